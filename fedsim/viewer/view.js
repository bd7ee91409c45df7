"use strict";
// Every view has an address, and the server draws it. A change of the form fetches the new address
// and puts in what has changed, so that the page works without this script, too.
const prefix = document.body.dataset.prefix;
let latest = 0; // fetch, whose answer counts
let timer = 0;

// The address of what the form says; a change of `left` leaves keys out.
const addressOf = (form, left = []) => {
  const kept = [...new FormData(form)].filter(([key, value]) => value !== "" && !left.includes(key));
  return "?" + new URLSearchParams(kept);
};
// Shows another address, or the same again, in place.
const show = async (address, remember = true) => {
  const number = ++latest;
  clearTimeout(timer);
  document.body.classList.add("busy");
  let answer, text;
  try {
    answer = await fetch(address);
    text = await answer.text();
  } catch {
    text = "";
  }
  if (number !== latest) return;
  document.body.classList.remove("busy");
  if (!text) {
    tell("The server has stopped; start fedsim view again.");
    return;
  }
  const found = new DOMParser().parseFromString(text, "text/html");
  if (!answer.ok) {
    tell(found.querySelector(".warn")?.textContent.trim() || text);
    return;
  }
  tell("");
  if (remember) history.replaceState(null, "", answer.url); // without what led on
  for (const part of found.querySelectorAll("[data-part]")) {
    const old = document.getElementById(part.id);
    if (!old || old.outerHTML === part.outerHTML) continue;
    const focused = old.contains(document.activeElement) && document.activeElement;
    old.replaceWith(part);
    if (focused) again(focused, part)?.focus();
  }
  const now = found.getElementById("round");
  if (now && !slider) return location.reload(); // the first round has come
  if (now && now.max !== slider.max) {
    slider.max = now.max;
    if (!new URL(address, location.href).searchParams.has("round")) slider.value = now.max;
    place();
  }
  const [curve, slide] = ["#curve .curve", ".slide"].map((one) => document.querySelector(one));
  if (curve && slide)
    for (const end of ["--first", "--last"])
      slide.style.setProperty(end, curve.style.getPropertyValue(end));
  wait();
};
// The element of a new part that another one had before.
const again = (old, part) =>
  old.id ? document.getElementById(old.id)
    : old.name && [...part.querySelectorAll(`[name="${old.name}"]`)].find((one) => one.type !== "radio" || one.value === old.value);
const tell = (line) => {
  let place = document.getElementById("problem");
  if (!line) return place?.remove();
  if (!place) {
    place = Object.assign(document.createElement("div"), { id: "problem", className: "warn" });
    place.setAttribute("role", "alert");
    document.querySelector("main").prepend(place);
  }
  place.textContent = line;
};
// What is being worked on is looked at again soon, runs that are going on later.
const wait = () => {
  clearTimeout(timer);
  const soon = document.querySelector("[data-wait]");
  if (soon || document.querySelector("[data-live]"))
    timer = setTimeout(() => show(location.href, false), soon ? 150 : 2000);
};
const form = document.querySelector("form[data-auto]");
const slider = document.getElementById("round");
if (form) {
  form.addEventListener("submit", (event) => { event.preventDefault(); show(addressOf(form)); });
  form.addEventListener("change", (event) => {
    const { name, type } = event.target;
    if (type === "file") return send(event.target.files[0]);
    const left = { row: ["input", "text"], text: ["row", "input"] }[name] || [];
    show(addressOf(form, left));
  });
}
// The handle stands above the slider's knob.
const place = () => {
  const span = slider.max - slider.min;
  slider.closest(".dragged").style.setProperty("--at", span ? (slider.value - slider.min) / span : 0);
  document.getElementById("round-told").value = slider.value;
};
if (slider) {
  slider.addEventListener("input", () => { place(); show(addressOf(form)); });
}
// An input that was chosen or dropped in.
const send = async (file) => {
  if (!file) return;
  const body = new FormData();
  body.append("file", file);
  const answer = await fetch(`${prefix}input`, { method: "POST", body });
  if (!answer.ok) {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    tell(page.querySelector(".warn")?.textContent.trim() || "This file cannot be read.");
    return;
  }
  const { input } = await answer.json();
  show(`${addressOf(form, ["row", "text", "input"])}&input=${encodeURIComponent(input)}`);
};
if (slider) {
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    send(event.dataTransfer.files[0]);
  });
}
document.addEventListener("click", async (event) => {
  if (event.target.closest("[data-cancel]")) {
    await fetch(`${prefix}cancel/${document.body.dataset.path}${location.search}`, { method: "POST" });
    show(location.href, false);
  }
  const link = event.target.closest("main a");
  if (link && form && link.search && link.pathname === location.pathname && link.id !== "here") {
    event.preventDefault();
    show(link.href);
  }
});
// Arrows go from tile to tile.
document.addEventListener("keydown", (event) => {
  const group = event.target.closest("[data-arrows]");
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 }[event.key];
  if (!group || step === undefined || event.target.type !== "checkbox") return;
  const all = [...group.querySelectorAll("input[type=checkbox]")];
  const top = (one) => one.parentElement.offsetTop;
  const across = all.filter((one) => top(one) === top(all[0])).length;
  const to = all[all.indexOf(event.target) + (step || (event.key === "ArrowDown" ? across : -across))];
  if (to) { event.preventDefault(); to.focus(); }
});
wait();
