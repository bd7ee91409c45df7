"""Write the table of the papers' claims, README.md beside this file: python experiments/claims.py

Each claim is «held», «not held», or «not decidable» for a reason. Figures, and verdicts where the
results can decide, are computed from the results in the experiments' folders. A difference is of
pairs of runs with the same seed, with its 95 % confidence interval; it is significant at
p < 0.05 in a two-tailed paired t-test, corrected for the tests of a claim (Holm).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from tables import Paired, holm, paired, table

HERE = Path(__file__).parent
FILE = HERE / "README.md"

HELD, NOT_HELD, UNDECIDED = "held", "not held", "not decidable"


class Verdict(NamedTuple):
    """What became of a claim, and the figures that decide it."""

    verdict: str
    why: str


Decide = Callable[[], Verdict]


class Claim(NamedTuple):
    """A claim of a paper.

    Attributes:
        id: of the project's.
        system: whose paper it is in, and the folder of the experiment.
        where: in the paper.
        text: the claim, in our words.
        decide: its verdict, from the results.
    """

    id: str
    system: str
    where: str
    text: str
    decide: Decide


CLAIMS: list[Claim] = []


def claim(id: str, system: str, where: str, text: str) -> Callable[[Decide], Decide]:
    """Add a claim that the decorated function decides; arguments as of `Claim`."""

    def add(decide: Decide) -> Decide:
        CLAIMS.append(Claim(id, system, where, text, decide))
        return decide

    return add


# -- figures -----------------------------------------------------------------------------------


@cache
def results(name: str) -> pd.DataFrame:
    """The rows of experiments/FOLDER/results/NAME.csv, by "folder/name"."""
    folder, _, file = name.partition("/")
    return pd.read_csv(HERE / folder / "results" / f"{file}.csv")


def of(name: str, column: str = "accuracy", **where: object) -> pd.Series:
    """A column by seed, of the rows in which other columns have these values."""
    found = results(name)
    for key, value in where.items():
        found = found[found[key.replace("__", ".")] == value]
    assert found["seed"].is_unique, (name, where)
    return found.set_index("seed")[column]


def difference(
    name: str,
    one: object,
    other: object,
    axis: str = "method",
    column: str = "accuracy",
    **where: object,
) -> Paired:
    """One value of an axis less another, in the rows in which other columns have these values."""
    return paired(
        of(name, column, **{axis: one}, **where), of(name, column, **{axis: other}, **where)
    )


def leads(
    name: str, ours: str, others: list[str], column: str = "accuracy", **where: object
) -> dict[str, Paired]:
    """Ours less each other method."""
    return {
        f"{ours} − {other}": difference(name, ours, other, column=column, **where)
        for other in others
    }


def significant(tests: dict[str, Paired]) -> tuple[list[str], list[str]]:
    """The names of differences that are above 0 and below 0, at p < 0.05 by Holm."""
    corrected = holm(each.p for each in tests.values())
    found = [
        (name, each) for (name, each), p in zip(tests.items(), corrected, strict=True) if p < 0.05
    ]
    return [n for n, each in found if each.mean > 0], [n for n, each in found if each.mean < 0]


def decided(tests: dict[str, Paired], size: float | dict[str, float] = 0.0) -> str:
    """What became of a claim that all of these differences are above 0.

    Held if all of them significantly are. Not held if one is significantly below, or if one is not
    significantly above and its 95 % interval (which is not corrected) is below `size`.

    Args:
        size: what the paper reports, of all or of each.
    """
    above, below = significant(tests)
    if len(above) == len(tests):
        return HELD
    sizes = size if isinstance(size, dict) else dict.fromkeys(tests, size)
    ruled_out = [n for n, each in tests.items() if n not in above and each.high < sizes[n]]
    return NOT_HELD if below or ruled_out else UNDECIDED


def listed(tests: dict[str, Paired]) -> str:
    return ", ".join(f"{name} {each}" for name, each in tests.items())


# -- FedRNL ------------------------------------------------------------------------------------

RIVALS = ["FedAvg", "FedProx", "FedBABU", "FedDyn", "MOON"]
SCORES = {"accuracy": "accuracy", "F1": "rationale_f1"}  # columns by what they are called


def on_reviews(domain: str, sizes: dict[str, float]) -> Verdict:
    """FedRNL above its rivals in each score.

    Undecided where nothing shows that there is room: centralised training is not above FedAvg, and
    FedRNL does not differ from a rival.

    Args:
        sizes: by how much the paper's FedRNL is above its best rival, by score.
    """
    found, verdicts = [], []
    for score, size in sizes.items():
        column = SCORES[score]
        tests = leads("fedrnl/methods", "FedRNL", RIVALS, column, domain=domain)
        room = difference("fedrnl/methods", "centralised", "FedAvg", column=column, domain=domain)
        differs = any(significant(tests))
        verdicts.append(decided(tests, size) if room.low > 0 or differs else UNDECIDED)
        found.append(f"{score}: {listed(tests)}; centralised − FedAvg {room}")
    verdict = next((v for v in (NOT_HELD, UNDECIDED) if v in verdicts), HELD)
    return Verdict(
        verdict,
        "eight seeds, tuned on beer with the same budget, 20 rounds, before methods converge; "
        + "; ".join(found),
    )


@claim("R1", "fedrnl", "Table 1", "the most accurate of six methods on beer reviews")
def accurate_on_beer() -> Verdict:
    """On reviews that mention one aspect; beside it on those that mention all, which level off."""
    found = on_reviews("beer", {"accuracy": 0.03})
    level = leads("fedrnl/mixed", "FedRNL", ["FedAvg", "MOON"])
    return Verdict(found.verdict, f"{found.why}. With all aspects in a review: {listed(level)}")


@claim("R2", "fedrnl", "Table 1", "the best rationales (F1) of the six on beer reviews")
def rationales_on_beer() -> Verdict:
    return on_reviews("beer", {"F1": 0.01})


@claim("R3", "fedrnl", "Table 2", "the same on hotel reviews")
def on_hotels() -> Verdict:
    return on_reviews("hotel", {"accuracy": 0.023, "F1": 0.005})


@claim("R4", "fedrnl", "Fig. 3", "the lead over FedAvg grows as clients fall from 40 to 4")
def clients() -> Verdict:
    lead = difference("fedrnl/methods", "FedRNL", "FedAvg", domain="beer")
    return Verdict(
        UNDECIDED,
        f"12 and 40 clients were not run on the task with room; with four, FedRNL − FedAvg {lead}",
    )


@claim("R5", "fedrnl", "Fig. 4", "soft sharing beats hard sharing, most with 4 clients")
def soft_and_hard() -> Verdict:
    """With four clients, where the paper's FedRNL is eight points above FR."""
    reviews = {"one aspect in a review": "fedrnl/methods", "all aspects": "fedrnl/mixed"}
    tests, f1 = (
        {
            what: difference(name, "FedRNL", "FR", column=column, domain="beer")
            for what, name in reviews.items()
        }
        for column in SCORES.values()
    )
    return Verdict(
        decided(tests, 0.082),
        f"accuracy with four clients, eight seeds; FedRNL − FR: {listed(tests)}; F1: {listed(f1)} "
        "(12 and 40 clients not run)",
    )


@claim("R6", "fedrnl", "Table 3", "Frobenius is the best of four distances")
def distances() -> Verdict:
    """At the λ that is best for Frobenius, and at the paper's λ = 2."""
    name, axis = "fedrnl/distances", "method.encoder_loss"
    tests = {
        f"Frobenius − {kind} at λ {lam:g}": difference(name, "frobenius", kind, axis, lam=lam)
        for lam in sorted(results(name)["lam"].unique())
        for kind in ("l2", "l1", "cos")
    }
    return Verdict(decided(tests, 0.018), f"five seeds: {listed(tests)}")


@claim("R7", "fedrnl", "Fig. 5", "accuracy and F1 fall slightly from 2 to 7 local epochs")
def local_epochs() -> Verdict:
    """After as many rounds, and after about as many epochs in all: 2 · 20 and 7 · 6."""
    name, axis = "fedrnl/epochs-rounds", "train.local_epochs"
    tests = {}
    for what, column in SCORES.items():
        two = of(name, column, **{axis: 2, "round": 20})
        for after, t in {"20 rounds": 20, "as many epochs": 6}.items():
            seven = of(name, column, **{axis: 7, "round": t})
            tests[f"{what} after {after}"] = paired(two, seven)
    return Verdict(
        UNDECIDED,
        f"with two epochs 20 rounds are too few to converge; 2 − 7, eight seeds: {listed(tests)}",
    )


@claim("R8", "fedrnl", "Fig. 6", "accuracy peaks near λ = 2, F1 near λ = 0.5")
def strength() -> Verdict:
    """Above λ = 0, which is FedAvg, after few rounds and after more with a lower rate."""
    name, axis = "fedrnl/lambda", "method.lam"
    tests = {}
    for schedule in results(name)["schedule"].unique():
        peaks = {f"accuracy, λ 2 − 0, {schedule}": (2, "accuracy")}
        peaks[f"F1, λ 0.5 − 0, {schedule}"] = (0.5, "rationale_f1")
        for what, (lam, column) in peaks.items():
            tests[what] = difference(name, lam, 0, axis, column, schedule=schedule)
    least = difference(name, 0.004, 0, axis, schedule="lr 0.002, 60 rounds")
    return Verdict(
        decided(tests),
        f"five seeds, before methods with λ > 0 converge: {listed(tests)}; accuracy, λ 0.004 − 0 "
        f"after 60 rounds: {least}",
    )


@claim(
    "R9",
    "fedrnl",
    "Fig. 2",
    "hard sharing makes clients' predictors more alike, and generators less",
)
def similarity() -> Verdict:
    at = {"domain": "beer", "round": 20}
    tests = {
        "predictors, FR − FedAvg": difference(
            "fedrnl/similarity", "FR", "FedAvg", column="predictor", **at
        ),
        "generators, FedAvg − FR": difference(
            "fedrnl/similarity", "FedAvg", "FR", column="generator", **at
        ),
    }
    return Verdict(
        decided(tests), f"CKA between clients after round 20, eight seeds: {listed(tests)}"
    )


# -- XPFL --------------------------------------------------------------------------------------

SETS = ("fashion_mnist", "cifar10")
POINTS = 0.02  # what counts as beating, where a figure of the paper has no numbers
CHOSEN = "with ψ of the updates, the best of the search"


@claim("X1", "xpfl", "Fig. 4-6", "the generative autoencoder reconstructs better")
def autoencoders() -> Verdict:
    tests = {
        data: difference("xpfl/reconstruction", "GAE", "CAE", "autoencoder", "psnr", data=data)
        for data in ("mnist", *SETS)
    }
    worst = of("xpfl/reconstruction", "psnr", data="mnist", autoencoder="CAE").min()
    return Verdict(
        UNDECIDED,
        f"the convolutional one did not converge on MNIST (down to {worst:.1f} dB); PSNR, dB, of "
        f"the generative one − its: {listed(tests)}",
    )


@claim("X2", "xpfl", "Fig. 7", "with 10 % of the labels it beats SemiFL with 10 and 20 %")
def few_labels() -> Verdict:
    tests = {
        f"XPFL − {other}, {data}": difference("xpfl/labels", "XPFL 0.1", other, data=data)
        for data in SETS
        for other in ("SemiFL 0.1", "SemiFL 0.2")
    }
    described = of("xpfl/released", method="as described", data="fashion_mnist")
    lower = paired(described, of("xpfl/labels", method="XPFL 0.1", data="fashion_mnist"))
    return Verdict(
        decided(tests, POINTS),
        f"five seeds, {CHOSEN}: {listed(tests)}; XPFL as described − XPFL, fashion_mnist {lower}",
    )


@claim("X3", "xpfl", "Fig. 7", "with 20 % it beats FedAvg with all labels")
def more_labels() -> Verdict:
    tests, room = (
        {data: difference("xpfl/labels", one, other, data=data) for data in SETS}
        for one, other in (("XPFL 0.2", "FedAvg"), ("FedAvg", "FedAvg 0.1"))
    )
    return Verdict(
        decided(tests, POINTS),
        f"five seeds, {CHOSEN}: {listed(tests)}; FedAvg with all labels − with 10 %: "
        f"{listed(room)}",
    )


@claim("X4", "xpfl", "Fig. 8", "beats FedAvgM, FedProx, SCAFFOLD at η 0.1, 0.3, 0.5")
def skew() -> Verdict:
    """At 0.5 and at 0.1."""
    tests = {}
    for data in SETS:
        for m in ("FedAvgM", "FedProx", "SCAFFOLD"):
            what = f"XPFL − {m}, {data}, η"
            tests[f"{what} 0.5"] = difference("xpfl/labels", "XPFL 0.1", f"{m} 0.1", data=data)
            tests[f"{what} 0.1"] = difference("xpfl/skew", "XPFL", m, data=data)
    return Verdict(decided(tests, POINTS), f"five seeds, {CHOSEN} (0.3 not run): {listed(tests)}")


def explained(column: str, data: str, t: int) -> pd.Series:
    """By seed, the mean over XPFL's clients of what explains them in round t."""
    rows = results("xpfl/labels-clients")
    rows = rows[(rows["what"] == "explanation") & (rows["method"] == "XPFL 0.1")]
    return rows[(rows["data"] == data) & (rows["round"] == t)].groupby("seed")[column].mean()


@claim("X5", "xpfl", "Fig. 9", "the tree reproduces the model's outputs")
def trees() -> Verdict:
    """On images that it was not grown on: fidelity above 0.9, and above a tree of one leaf's."""
    tests, grown = {}, []
    for data in SETS:
        found = explained("held_out_fidelity", data, 40)
        tests[f"fidelity − 0.9, {data}"] = paired(found, pd.Series(0.9, found.index))
        leaf = explained("held_out_majority", data, 40)
        tests[f"fidelity − one leaf's, {data}"] = paired(found, leaf)
        grown.append(f"{data} {explained('fidelity', data, 40).mean():.2f}")
    return Verdict(
        decided(tests),
        f"{CHOSEN}, on held-out images, trees of up to 400 images: {listed(tests)}. On the images "
        f"that it was grown on, as in the paper, any unpruned tree agrees: {', '.join(grown)}",
    )


@claim("X6", "xpfl", "Fig. 10", "fusion lowers the t-SNE divergence of the features")
def fusion() -> Verdict:
    """In each of three rounds."""
    tests = {
        f"{data}, round {t}": paired(
            explained("divergence_before", data, t), explained("divergence_after", data, t)
        )
        for data in SETS
        for t in (1, 20, 40)
    }
    return Verdict(
        UNDECIDED,
        f"run {CHOSEN}, not with the paper's or the released code's; before − after: "
        f"{listed(tests)}",
    )


# -- FedSeIT -----------------------------------------------------------------------------------

NO_CONTROL = (
    "no control for transfer yet: FedSeIT has a trained dense layer that FedWeIT lacks, and was "
    "not run without others"
)


def transfer(lam2: float, column: str = "tta") -> Verdict:
    tests = {
        data: difference(
            f"fedseit/{name}", "FedSeIT", "FedWeIT", column=column, data=data, lam2=lam2
        )
        for data, name in {"TREC6": "table2", "R8": "table2", "TREC50": "trec50"}.items()
    }
    return Verdict(UNDECIDED, f"{NO_CONTROL}; FedSeIT − FedWeIT: {listed(tests)}")


@claim("S1", "fedseit", "Table 2", "beats FedWeIT at λ₂ = 1")
def at_one() -> Verdict:
    return transfer(1)


@claim("S2", "fedseit", "Table 2", "and at λ₂ = 0.1, by more")
def at_a_tenth() -> Verdict:
    return transfer(0.1)


def variants(ours: str, theirs: str) -> str:
    """One variant of FedSeIT less another, at λ₂ = 1."""
    return listed(
        {
            data: difference("fedseit/table2", ours, theirs, column="tta", data=data, lam2=1)
            for data in ("TREC6", "R8")
        }
    )


def selection(ours: str, theirs: str) -> Verdict:
    return Verdict(
        UNDECIDED,
        f"three clients leave little to select from; {ours} − {theirs}: {variants(ours, theirs)}",
    )


@claim("S3", "fedseit", "Table 2", "a selection of three costs nothing")
def three() -> Verdict:
    return selection("SIT3", "FedSeIT")


@claim("S4", "fedseit", "Table 2", "five are at least as good as three")
def five() -> Verdict:
    return selection("SIT5", "SIT3")


@claim("S5", "fedseit", "Table 2", "local dense layers are better than shared ones")
def dense_layers() -> Verdict:
    return Verdict(
        UNDECIDED,
        "λ₂ = 0.1 and TMN, where the paper's difference is largest, are not run yet; at λ₂ = 1 "
        f"local − shared: {variants('FedSeIT', 'DLS')}",
    )


@claim("S6", "fedseit", "Fig. 5", "ahead of FedWeIT from a task's first round on")
def first_round() -> Verdict:
    return transfer(1, "first_round")


# -- OpenFL-XAI --------------------------------------------------------------------------------


@claim("F1", "openfl_xai", "released model", "the published global rule base, exactly")
def published_rules() -> Verdict:
    return Verdict(
        HELD,
        "all antecedents, and weights and consequents up to float32's rounding of sums in another "
        "order of clients (tests/models/test_tsk.py, where the data are present)",
    )


# -- FedXDS ------------------------------------------------------------------------------------

BASELINES = ["FedAvg", "FedProx", "FedDyn", "SCAFFOLD", "FedSAM", "FedDisco", "FedFTG"]
BASELINES += ["FedGen", "FedAUX", "FedDF", "FedFed"]


@claim("D1", "fedxds", "Tables 2, 3", "beats eleven methods significantly, FedFed mostly")
def best_of_all() -> Verdict:
    name = "fedxds/heterogeneity"
    tests = leads(name, "FedXLRP", [m for m in BASELINES if m != "FedFed"], alpha=0.1)
    skewed = leads(name, "FedXLRP", ["FedAvg", "FedDyn"], alpha=0.05)
    tests |= {f"{key} at α 0.05": each for key, each in skewed.items()}
    mostly = {f"α {a}": difference(name, "FedXLRP", "FedFed", alpha=a) for a in (0.1, 0.05)}
    above, below = significant(tests)
    return Verdict(
        decided(tests),
        f"ten seeds, all methods tuned with the same budget (at α 0.1). Significantly above in "
        f"{len(above)} of {len(tests)} tests, below in {len(below)}: {listed(tests)}; "
        f"FedXLRP − FedFed: {listed(mostly)}",
    )


@claim("D2", "fedxds", "Table 1, §6", "LRP beats IG by six points, and IG beats gradients")
def which_map() -> Verdict:
    first, second, random = {}, {}, {}
    for data, name in {"Fashion-MNIST": "fedxds/maps", "CIFAR-10": "fedxds/cifar"}.items():
        first[f"LRP − IG, {data}"] = difference(name, "FedXLRP", "FedXIG")
        for other in ("FedXGrad", "FedXSG"):
            second[f"IG − {other}, {data}"] = difference(name, "FedXIG", other)
        random[data] = difference(name, "FedXLRP", "random map")
    sound = difference("fedxds/control", "FedXLRP", "random map", data__spurious=0)
    random["small digits on photographs"] = sound  # the code can tell maps apart
    verdict = decided(first, 0.064)
    if verdict == HELD:
        verdict = decided(first | second)
    return Verdict(
        verdict if sound.low > 0 else UNDECIDED,
        "ten seeds of Fashion-MNIST, five of CIFAR-10: "
        f"{listed(first | second)}. LRP − random map: {listed(random)}",
    )


@claim("D3", "fedxds", "Table 1", "accuracy grows with the share that is sent, LRP's by 6 points")
def fraction() -> Verdict:
    tests = {
        m: paired(of("fedxds/maps", method=m), of("fedxds/attribution", method=m))
        for m in ("FedXLRP", "FedXIG", "FedXGrad")
    }
    verdict = decided(tests)
    if verdict == UNDECIDED and tests["FedXLRP"].high < 0.06:
        verdict = NOT_HELD
    return Verdict(verdict, f"all images − half, ten seeds: {listed(tests)}")


@claim("D4", "fedxds", "§6", "stable from 60 to 85 % removed, LRP most")
def sparsification() -> Verdict:
    """Not held if LRP falls by a point, significantly; stable if two points are ruled out."""
    name, axis, point = "fedxds/sparsification", "method__removed", 0.01
    others = ["FedXIG", "FedXGrad", "random map"]
    falls = {m: difference(name, 85, 60, axis, method=m) for m in ["FedXLRP", *others]}
    change = {
        m: of(name, method=m, **{axis: 85}) - of(name, method=m, **{axis: 60}) for m in falls
    }
    most = {f"{m}'s fall − FedXLRP's": paired(change["FedXLRP"], change[m]) for m in others}
    if falls["FedXLRP"].high < -point:
        verdict = NOT_HELD
    else:
        verdict = decided(most) if falls["FedXLRP"].low > -2 * point else UNDECIDED
    seeds = len(change["FedXLRP"])
    return Verdict(verdict, f"85 % removed − 60 %, {seeds} seeds: {listed(falls)}; {listed(most)}")


@claim("D5", "fedxds", "§11.1", "warm-up helps sharply up to 10 rounds, little after")
def warm_up() -> Verdict:
    """Held if the second ten rounds help significantly less than half as much as the first."""
    none, twenty = (of("fedxds/warmup", "late", **{"warm-up rounds": k}) for k in (0, 20))
    ten = of("fedxds/maps", "late", method="FedXLRP")
    tests = {
        "10 − 0 rounds": paired(ten, none),
        "half of that − (20 − 10 rounds)": paired((ten - none) / 2, twenty - ten),
    }
    after = {"20 − 10 rounds": paired(twenty, ten)}
    return Verdict(decided(tests), f"ten seeds: {listed(tests | after)}")


@claim("D6", "fedxds", "Fig. 1-3", "inversion fails where it succeeds on raw images and FedFed's")
def inversion() -> Verdict:
    """Not held if its reconstructions are significantly closer than the mean, at every σ."""
    name, ssim, sigmas = "fedxds/privacy", "reconstructed_ssim", ("0.15", "0.5", "1.5")
    others = {
        run: difference(name, run, f"FedXLRP, σ {sigma}", column=ssim)
        for sigma in sigmas
        for run in (f"raw, σ {sigma}", f"FedFed, σ {sigma}")
    }
    floor = {}
    for sigma in sigmas:
        ours = {"method": f"FedXLRP, σ {sigma}"}
        floor[f"σ {sigma}"] = paired(of(name, ssim, **ours), of(name, "class_mean_ssim", **ours))
    above, _ = significant(others)
    succeeds, _ = significant(floor)
    mask = difference(name, "FedXLRP, σ 0.15", "mask alone, σ 0.15", column=ssim)
    return Verdict(
        NOT_HELD if len(succeeds) == len(sigmas) else UNDECIDED,
        "SSIM of reconstructions, five seeds. FedXLRP − the mean image of a class: "
        f"{listed(floor)}; − the reconstructions from mask and label alone: σ 0.15 {mask}. "
        f"Others leak more, significantly in {len(above)} of {len(others)} tests: "
        f"theirs − FedXLRP's {listed(others)}",
    )


@claim("D7", "fedxds", "§7", "training is faster and smoother")
def smoother() -> Verdict:
    never = 44  # the evaluation after the last one
    name = "fedxds/heterogeneity"
    reached = [
        of(name, "round_reached", alpha=0.1, method=m).fillna(never) for m in ("FedAvg", "FedXLRP")
    ]
    tests = {
        "roughness": difference(name, "FedAvg", "FedXLRP", column="roughness", alpha=0.1),
        "round of 70 %": paired(*reached),
    }
    return Verdict(decided(tests), f"FedAvg's − FedXLRP's, ten seeds: {listed(tests)}")


@claim("D8", "fedxds", "§11.2", "a round is cheaper than FedFed's and FedFTG's, near FedGen's")
def cheaper() -> Verdict:
    name, seconds = "fedxds/cost", {"column": "training"}
    tests = {
        f"{m} − FedXLRP": difference(name, m, "FedXLRP", **seconds) for m in ("FedFed", "FedFTG")
    }
    near = {"FedGen − FedXLRP": difference(name, "FedGen", "FedXLRP", **seconds)}
    return Verdict(
        decided(tests),
        f"seconds a round, five turns: {listed(tests)}; {listed(near)} (near is not tested)",
    )


# -- the table ---------------------------------------------------------------------------------

NAMES = {
    "fedrnl": "FedRNL",
    "xpfl": "XPFL",
    "fedseit": "FedSeIT",
    "openfl_xai": "OpenFL-XAI",
    "fedxds": "FedXDS",
}


def page() -> str:
    decided = {each: each.decide() for each in CLAIMS}
    counts = {
        v: sum(found.verdict == v for found in decided.values())
        for v in (HELD, NOT_HELD, UNDECIDED)
    }
    rows = [
        [
            f"[{each.id}]({each.system}/README.md)",
            f"{NAMES[each.system]}, {each.where}",
            each.text,
            f"**{found.verdict}**",
            found.why,
        ]
        for each, found in decided.items()
    ]
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"""# What became of the papers' claims

Thirty claims of the five papers whose methods fedsim has: {said}. Figures are computed from the
results in these folders. A − B is a difference in the metric of the claim, over pairs of runs with
the same seed (the same partition and initial weights), with its 95 % confidence interval, which is
not corrected. "Significant" is p < 0.05 in a two-tailed paired t-test, corrected for the tests of
the claim (Holm). A claim is "not decidable" where a control or a rival's tuning is missing, where
nothing shows that the task leaves room for a difference, or where intervals are too wide; the
experiment's README says more.

{table(["claim", "paper", "in our words", "verdict", "figures"], rows)}

`python experiments/claims.py` writes this page from the results, and a test compares the two.
"""


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
