"""What MkDocs asks of this site beside its pages: those that are generated, and formulas.

The reference of the experiment file comes from the schema, that of the commands from the command
line's own definition, the catalogue from the methods' docstrings and `methods/methods.yaml`.
The READMEs of experiments are pages as well, with all files that they link to.

Pages link to a generated page by the file that it is generated from, as in
`[FedAvg](../../fedsim/methods/fedavg.py)`, so that the link works in the repository as well.
"""

from __future__ import annotations

import html
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import typer.main
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedsim.analysis.unlearning import unlearning
from fedsim.cli import PANELS, app
from fedsim.cli.schema import type_in_words
from fedsim.conditions.adversaries import Adversaries, Attack, attacks
from fedsim.conditions.aggregators import Aggregator, aggregators
from fedsim.conditions.codecs import Codec, codecs
from fedsim.conditions.devices import Devices
from fedsim.conditions.privacy import Privacy
from fedsim.conditions.secure import SecureSettings
from fedsim.config.registry import Config, Registry, key_docs, summary
from fedsim.data import Partition, Source, datasets, partitions
from fedsim.experiment import Checkpoint, Evaluate, Experiment
from fedsim.explain import Explainer
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers import explainers
from fedsim.explain.section import Explain
from fedsim.federation import EngineSettings
from fedsim.methods import Method, methods
from fedsim.models import Model, models
from fedsim.objectives import Objective, objectives
from fedsim.sweep.grid import GridSettings
from fedsim.sweep.settings import Asha, Range, SearchSettings, ranges
from fedsim.training import Train

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
METHODS = DOCS / "methods" / "methods.yaml"

# The generated pages, by what they are generated from.
GENERATED_FROM: Mapping[str, str] = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "fedsim/analysis/unlearning": "reference/unlearning.md",
    "fedsim/conditions/adversaries": "reference/attacks.md",
    "fedsim/conditions/aggregators": "reference/aggregators.md",
    "fedsim/cli": "reference/commands.md",
    "fedsim/conditions/codecs": "reference/codecs.md",
    "fedsim/data/partition.py": "reference/partitions.md",
    "fedsim/data/sources": "reference/data-sets.md",
    "fedsim/experiment.py": "reference/experiment-file.md",
    "fedsim/explain": "reference/explainers.md",
    "fedsim/methods": "methods/index.md",
    "fedsim/models": "reference/models.md",
    "fedsim/objectives": "reference/objectives.md",
}

# Components that are written as a section of their own, and where these are described.
PAGES: Mapping[type[Config], tuple[str, str]] = {
    Source: ("a data set", "../reference/data-sets.md"),
    Partition: ("a partition", "../reference/partitions.md"),
    Model: ("a model", "../reference/models.md"),
    Method: ("a method", "../methods/index.md"),
    Objective: ("an objective", "../reference/objectives.md"),
    FeatureExplainer: ("an explainer", "../reference/explainers.md"),
    Explainer: ("an explainer", "../reference/explainers.md"),
    Codec: ("a codec", "../reference/codecs.md"),
    Aggregator: ("a rule", "../reference/aggregators.md"),
    Attack: ("an attack", "../reference/attacks.md"),
    Range: ("a range", "../reference/experiment-file.md#ranges"),
}
COMPONENTS: Mapping[str, tuple[str, Registry[Any], str]] = {
    "data-sets": ("Data sets", datasets, "data"),
    "partitions": ("Partitions", partitions, "partition"),
    "models": ("Models", models, "model"),
    "objectives": ("Objectives", objectives, "objective"),
    "explainers": ("Explainers", explainers, "explain.explainers"),
    "codecs": ("Codecs", codecs, "uplink"),
    "aggregators": ("Aggregation rules", aggregators, "aggregation"),
    "attacks": ("Attacks", attacks, "adversaries.attack"),
    "unlearning": ("Unlearning methods", unlearning, "fedsim unlearn --method"),
}
SECTION_TYPES: Mapping[str, type[Config]] = {
    "train": Train,
    "engine": EngineSettings,
    "evaluate": Evaluate,
    "explain": Explain,
    "privacy": Privacy,
    "adversaries": Adversaries,
    "devices": Devices,
    "secure_aggregation": SecureSettings,
    "checkpoint": Checkpoint,
    "grid": GridSettings,
    "search": SearchSettings,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the methods' pages to the navigation, by family."""
    assert config.nav is not None
    section = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    families: dict[str, list[dict[str, str]]] = {}
    for name, note in notes().items():
        families.setdefault(note["family"], []).append({note["title"]: f"methods/{name}.md"})
    section += [{family: pages} for family, pages in families.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated, and those that lie elsewhere in the repository."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for path in sorted((ROOT / "experiments").rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.parts)
        if path.is_file() and not hidden and path.suffix != ".py":
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to the pages generated from them."""
    folder = (DOCS / page.file.src_uri).parent

    def lead(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / found["path"]))
        if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT):
            return found[0]
        shown = page_of(target.relative_to(ROOT).as_posix())
        return f"]({os.path.relpath(DOCS / shown, folder)}{found['anchor'] or ''})"

    return re.sub(r"\]\((?!\w+:)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)", lead, text)


def page_of(path: str) -> str:
    """The page that shows a file of the repository."""
    if path in GENERATED_FROM:
        return GENERATED_FROM[path]
    if path.startswith("fedsim/methods/"):
        return f"methods/{Path(path).stem}.md"
    return path  # of an experiment


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    r"""Formulas, which Arithmatex leaves as \(…\) and \[…\], as MathML: browsers draw it."""

    def draw(found: re.Match[str]) -> str:
        display = "block" if found["open"] == "[" else "inline"
        return str(convert(html.unescape(found["latex"]), display=display))

    return re.sub(
        r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]\s*'
        r"</(?P=tag)>",
        draw,
        text,
        flags=re.DOTALL,
    )


def generated() -> dict[str, str]:
    """The generated pages by path."""
    pages = {
        "reference/experiment-file.md": experiment_page(),
        "reference/commands.md": commands_page(),
        "methods/index.md": catalogue_page(),
        **{f"methods/{name}.md": method_page(name) for name, _ in methods.items()},
    }
    for page, (title, registry, section) in COMPONENTS.items():
        pages[f"reference/{page}.md"] = components_page(title, registry, section)
    for name in ("CONTRIBUTING", "CHANGELOG"):
        if (ROOT / f"{name}.md").exists():
            pages[f"{name.lower()}.md"] = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    return pages


# -- the experiment file --------------------------------------------------------------------------


def experiment_page() -> str:
    lines = [
        "# The experiment file",
        "An experiment file is YAML. Its sections are listed here with every key, as the schema "
        "has them. Any key can be set on the command line as `section.key=value`. An unknown "
        "key, or a value out of range, is refused before anything starts.",
        "`fedsim run FILE --print-config` prints a file with every default filled in.",
        "## Top level",
        keys_table(Experiment, ""),
    ]
    for name, section in SECTION_TYPES.items():
        lines += [f"## `{name}` {{ #{name} }}", summary(section), keys_table(section, f"{name}.")]
        if name == "search":
            lines += ["### Ranges { #ranges }", "The values that a hyper-parameter may take."]
            for kind, component in ranges.items():
                keyed = keys_table(component, "", skip=("type",))
                lines += [f"#### `type: {kind}`", summary(component), keyed]
            lines += ["### `search.asha` { #asha }", summary(Asha)]
    return "\n\n".join(lines)


def components_page(title: str, registry: Registry[Any], section: str) -> str:
    lines = [
        f"# {title}",
        f"What `{section}` can name. A class of your own is named `package.module:Name`.",
        "| `"
        + registry.key
        + "` | what it is |\n| --- | --- |\n"
        + "\n".join(
            f"| [`{name}`](#{name}) | {cell(first_line(component))} |"
            for name, component in registry.items()
        ),
    ]
    shared = [c for c in dict.fromkeys(registry.base.model_fields) if c != registry.key]
    if shared:
        lines += ["## Keys of all", keys_table(registry.base, "", skip=(registry.key,))]
    for name, component in registry.items():
        lines += [f"## `{name}` {{ #{name} }}", summary(component)]
        own = keys_table(component, "", skip=(registry.key, *shared))
        lines += [own or "No keys of its own."]
    return "\n\n".join(lines)


def keys_table(section: type[Config], prefix: str, skip: tuple[str, ...] = ("name",)) -> str:
    """Every key of a section as a table, those of sections within it as well."""
    if section is Experiment or issubclass(section, Asha):
        skip = ()
    rows = [
        f"| `{key}` | {cell(kind)} | {cell(default)} | {cell(meaning)} |"
        for key, kind, default, meaning in keys(section, prefix, skip)
    ]
    if not rows:
        return ""
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def keys(
    section: type[Config], prefix: str, skip: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, str, str]]:
    """The keys of a section: path, type, default, meaning."""
    meanings = key_docs(section)
    for key, field in section.model_fields.items():
        if key in skip:
            continue
        path, inner = f"{prefix}{key}", section_within(field.annotation)
        if section is Experiment and key in SECTION_TYPES:
            yield path, f"[section](#{key})", "", first_line(SECTION_TYPES[key])
            continue
        text = field.description or meanings.get(key, "")
        yield path, kind_of(section, key), default_of(field, inner), text
        if inner is not None:
            yield from keys(inner, f"{path}.")


def section_within(annotation: Any) -> type[Config] | None:
    """The section that a key holds, if it holds one that is not a component."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Config):
            return None if any(issubclass(part, base) for base in PAGES) else part
    return None


def kind_of(section: type[Config], key: str) -> str:
    """A key's type and bounds in words, with links to components."""
    schema = section.model_json_schema()
    node = schema["properties"][key]
    kind = type_in_words(node, schema.get("$defs", {}))
    for base, (name, page) in PAGES.items():
        if f"'#/$defs/{base.__name__}'" in str(node):
            return kind.replace("section", f"[{name}]({page})")
    return kind


def default_of(field: FieldInfo, inner: type[Config] | None) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    if inner is not None or value is PydanticUndefined:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


# -- docstrings -----------------------------------------------------------------------------------


def first_line(component: type) -> str:
    """The first paragraph of a docstring."""
    return " ".join(summary(component).split("\n\n")[0].split())


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("\n", " ").replace("|", "&#124;")


# -- commands -------------------------------------------------------------------------------------


def commands_page() -> str:
    command = typer.main.get_command(app)
    commands: dict[str, Any] = command.commands  # type: ignore[attr-defined]
    lines = [
        "# Commands",
        "`fedsim COMMAND --help` prints the same. An experiment can be changed by any number of "
        "`section.key=value` behind the file. Exit codes: 0, all went well; 1, a run failed; 2, "
        "the input was refused and nothing was started; 130, interrupted.",
        "| for | commands |\n| --- | --- |\n"
        + "\n".join(
            f"| {panel} | {', '.join(f'[`{name}`](#{name})' for name in names)} |"
            for panel, names in PANELS.items()
        ),
    ]
    for panel, names in PANELS.items():
        lines.append(f"## {panel} {{ #panel-{names[0]} }}")
        for name in names:
            one = commands[name]
            lines += [f"### `fedsim {name}` {{ #{name} }}", inspect.cleandoc(one.help or "")]
            rows = [
                f"| {cell(option(p))} | {cell(meaning(p))} | {cell(default(p))} |"
                for p in one.params
                if p.name != "help"
            ]
            if rows:
                head = ["| argument or option | meaning | default |", "| --- | --- | --- |"]
                lines.append("\n".join([*head, *rows]))
    return "\n\n".join(lines)


def option(parameter: Any) -> str:
    """How an argument or an option is written."""
    if parameter.param_type_name == "argument":
        more = " …" if parameter.nargs == -1 else ""
        return f"`{(parameter.metavar or parameter.name).upper()}{more}`"
    given = parameter.type_descriptor.annotation
    kind = next(iter(get_args(given)), given)
    if isinstance(kind, str):  # of a Literal
        return ", ".join(f"`{name} {'|'.join(get_args(given))}`" for name in parameter.opts)
    names = {Path: " PATH", int: " INTEGER", float: " NUMBER", str: " TEXT", bool: ""}
    return ", ".join(f"`{name}{names[kind]}`" for name in parameter.opts)


def meaning(parameter: Any) -> str:
    return re.sub(r" *\\?\[default.*?]", "", parameter.help or "")


def default(parameter: Any) -> str:
    if parameter.required:
        return "**required**"
    told = re.search(r"\[default: (.*?)]", parameter.help or "")
    if told:
        return told[1]
    empty = parameter.default in (None, False) or parameter.param_type_name == "argument"
    return "" if empty else f"`{parameter.default}`"


# -- the catalogue of methods ---------------------------------------------------------------------


def notes() -> dict[str, dict[str, Any]]:
    """Of each method what its docstring does not say."""
    with METHODS.open(encoding="utf-8") as file:
        found: dict[str, dict[str, Any]] = yaml.safe_load(file)
    return found


def catalogue_page() -> str:
    known = notes()
    lines = [
        "# Methods",
        "Each method is a class in `fedsim/methods/` that reads as its paper's algorithm and "
        "names the paper's symbol for every hyper-parameter. All pass one suite of tests: the "
        "same result in one process, on several actors of which one is killed, and after an "
        "interruption; and traffic counted as the paper's system would send it.",
    ]
    families = dict.fromkeys(note["family"] for note in known.values())
    for family in families:
        lines += [
            f"## {family}",
            "| `method.name` | what it does | published |\n| --- | --- | --- |\n"
            + "\n".join(
                f"| [`{name}`]({name}.md) | {cell(note['summary'])} | {note.get('year', '')} |"
                for name, note in known.items()
                if note["family"] == family
            ),
        ]
    covered = [n for n, m in methods.items() if m.learns.averages and not m.learns.asks]
    lines += [
        "## What they can learn",
        "Where the target is a number, these minimise the squared error and report R²: "
        + ", ".join(f"[`{n}`]({n}.md)" for n, note in known.items() if note.get("regression"))
        + ".",
        "With a [`privacy`](../reference/experiment-file.md#privacy) section, these clip and add "
        "noise to what clients send: " + ", ".join(f"[`{n}`]({n}.md)" for n in covered) + ".",
        "FedDF and FedAUX take auxiliary inputs from `method.auxiliary`, another data set, or "
        "from the share of the data that the server keeps: `partition.server_fraction`. That "
        "share also holds SemiFL's labels, and the examples by which SSE-AGG compares models.",
    ]
    return "\n\n".join(lines)


def method_page(name: str) -> str:
    component, note = methods.find(name), notes()[name]
    file = Path(inspect.getfile(component)).relative_to(ROOT)
    lines = [f"# {note['title']}", note["summary"]]
    if "paper" in note:
        cited = f"[{note['paper']}]({note['url']})" if "url" in note else note["paper"]
        lines.append(f"**Paper.** {cited}")
    if "formula" in note:
        lines += [f"$$\n{note['formula'].strip()}\n$$", note.get("symbols", "")]
    lines += ["## Details", summary(component)]
    table = keys_table(component, "method.")
    lines += [
        "## Options",
        table or "None of its own.",
        "## Try it",
        f"```console\n{note['try']}\n```" if "try" in note else f"See {note['guide']}.",
        "## Replicated",
        note["replicated"],
        "## Source",
        f'??? note "`{file}`"\n\n'
        + "\n".join(f"    {line}" for line in ("```python", *read(ROOT / file), "```")),
    ]
    return "\n\n".join(line for line in lines if line)


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
