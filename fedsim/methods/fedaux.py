"""FedAUX: pretraining on auxiliary inputs, and distillation weighted by similarity to clients.

Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning, IEEE
Transactions on Neural Networks and Learning Systems, 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.data import ClientSplits, Dataset
from fedsim.data.stored import AnyArray
from fedsim.errors import ExperimentError
from fedsim.federation import Client, Cohort, Federation, NotCounted, Vector, client_function
from fedsim.methods.learns import Learns
from fedsim.methods.method import State, methods
from fedsim.methods.shared.auxiliary import (
    AuxiliaryMethod,
    distil,
    draw_batches,
    ensemble,
    in_batches,
    pretrain,
)
from fedsim.methods.shared.classifiers import needs_classifier
from fedsim.methods.shared.images import check_images
from fedsim.models import Classifier
from fedsim.objectives import Classification, Concepts
from fedsim.support.rng import keyed_rng
from fedsim.training import FlatModel

NEGATIVES = 0.2  # share of the auxiliary inputs used as negatives
FLOOR = 1e-8  # minimum score, so that the sum is never 0


@dataclass(frozen=True)
class FedAUXState(State):
    """The server's state besides the weights.

    Attributes:
        initial: (size,) w_0, whose features h the scores use.
        scored: (m,) clients that have sent scores.
        scores: (m, n) those scores, s_k(x) of each distillation input x.
    """

    initial: Vector
    scored: NDArray[np.int64]
    scores: Vector


@methods.register
class FedAUX(AuxiliaryMethod[FedAUXState]):
    """FedAvg with pretrained features and distillation from weighted teachers (Sattler 2021).

    min_w KL(softmax(Σ_k s_k(x)·f(x; w_k) / Σ_k s_k(x)) ‖ softmax(f(x; w))) over four fifths of the
    auxiliary inputs x, starting from the average of the w_k; teachers are in eval mode. s_k(x) =
    P(own | x) + 1e-8 comes from a logistic regression that separates client k's inputs (class 1)
    from the other fifth of the auxiliary inputs (class 0):

        w* = argmin (1/n)·Σ_i log(1 + exp(−t_i·⟨w, h̃(x_i)⟩)) + (λ/2)·‖w‖²,  h̃ = h / max_i
        ‖h(x_i)‖

    over these n inputs, with h the features under w_0. Scores are computed with w* + N(0, σ²·I),
    σ² = 2·ln(1.25/δ)·(2/(n·λ))²/ε², which makes them (ε, δ)-private if the largest norm may be
    known. A client sends its scores once, before it first trains; clients that never take part
    send none. Auxiliary inputs are public and not counted as traffic; w_0, which is sent with the
    request for scores, is counted.

    Args:
        encoder: a safetensors file with the features' weights (such as a run's
            `final.safetensors`), used instead of pretraining.
        pretrain_epochs: passes of SimCLR over all auxiliary inputs before the first round; with 0,
            features stay random.
        regression: `paper`, as above; or `code`, as in the authors' released code: λ/n in place of
            λ, and a bias, with the same σ, which is then too small for ε and δ.
        l2: λ of the regression.
        epsilon: ε of differential privacy, below 1; null for scores without noise.
        delta: δ.
        epochs: distillation passes per round.
        batch_size: auxiliary inputs per step.
        lr: learning rate of Adam on the server.
    """

    name: str = "fedaux"
    learns: ClassVar[Learns] = Learns(
        objectives=(Classification, Concepts),
        task_sequences="no",
        asks=("messages", "sizes"),
        averages=False,
    )
    private_by_example: ClassVar[bool] = False
    encoder: Path | None = None
    pretrain_epochs: int = Field(10, ge=0)
    regression: Literal["paper", "code"] = "paper"
    l2: float = Field(0.01, gt=0)
    epsilon: float | None = Field(0.1, gt=0, lt=1)
    delta: float = Field(1e-5, gt=0, lt=1)
    epochs: int = Field(1, ge=0)
    batch_size: int = Field(128, ge=2)
    lr: float = Field(5e-5, gt=0)

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        super().check_data(dataset, splits, network)
        needs_classifier(self.name, network)
        if self.encoder is not None:
            read_features(self.encoder, FlatModel(network, torch.device("cpu")))
        elif self.pretrain_epochs:
            otherwise = (
                ": set method.pretrain_epochs=0, or name pretrained features in method.encoder"
            )
            check_images(self.name, "pretrains on", dataset, otherwise)

    def extra_hash_inputs(self) -> list[AnyArray]:
        encoder = [] if self.encoder is None else [np.fromfile(self.encoder, dtype=np.uint8)]
        return super().extra_hash_inputs() + encoder

    def init(self, fed: Federation) -> FedAUXState:
        weights, x = fed.initial_weights(), self.inputs(fed)
        if self.encoder is not None:
            views = fed.server.model.named(torch.from_numpy(weights))
            for name, tensor in read_features(self.encoder, fed.server.model).items():
                views[name].copy_(tensor)
        elif self.pretrain_epochs:
            weights = pretrain(fed, weights, x, self.pretrain_epochs, self.batch_size)
        _, distillation = self.split(fed)
        nobody = np.empty(0, dtype=np.int64)
        scores = np.empty((0, len(distillation)), dtype=np.float32)
        return FedAUXState(weights, weights, nobody, scores)

    def split(self, fed: Federation) -> tuple[Tensor, Tensor]:
        """Rows of the auxiliary inputs: the negatives, and those to distil on."""
        n = len(self.inputs(fed))
        order = torch.from_numpy(keyed_rng(fed.server.seed, "server/negatives").permutation(n))
        cut = round(NEGATIVES * n)
        order = order.to(fed.server.device)
        return order[:cut].sort().values, order[cut:].sort().values

    def round(self, fed: Federation, state: FedAUXState, t: int) -> FedAUXState:
        cohort = fed.sample(t)
        if self.epochs:
            state = self.ask_for_scores(fed, state, cohort)
        messages = fed.gather(self.local_update, cohort, weights=state.weights)
        models = {k: message["weights"] for k, message in messages.items()}
        weights = fed.server.average(models)
        place = {k: i for i, k in enumerate(state.scored.tolist())}
        teachers = [k for k in models if k in place]
        if teachers:
            x, (_, distillation) = self.inputs(fed), self.split(fed)
            scores = torch.zeros(len(teachers), len(x), device=fed.server.device)
            sent = state.scores[[place[k] for k in teachers]]
            scores[:, distillation] = torch.from_numpy(sent).to(fed.server.device)
            own = [models[k] for k in teachers]
            targets = ensemble(fed, own, list(scores), x, distillation)
            batches = draw_batches(fed, distillation, self.batch_size, self.epochs)
            weights = distil(fed, weights, x, targets, batches, [self.lr] * len(batches))
        return replace(state, weights=weights)

    def ask_for_scores(self, fed: Federation, state: FedAUXState, cohort: Cohort) -> FedAUXState:
        """Let clients score the distillation inputs if they have not done so."""
        new = np.setdiff1d(cohort, state.scored)
        if len(new) == 0:
            return state
        fed.server.model.load(torch.tensor(state.initial))
        x = self.inputs(fed)
        # Features of public inputs are the same for all clients and computed once.
        negatives, distillation = (
            represent(fed.server.model, x[rows]) for rows in self.split(fed)
        )
        if problem := self.swamped(
            int(fed.server.num_samples[new].max()) + len(negatives), negatives
        ):
            fed.server.notice(problem)
        with fed.setup_traffic():
            sent = fed.gather(
                self.score,
                new,
                weights=state.initial,
                negatives=NotCounted(negatives.cpu().numpy()),
                distillation=NotCounted(distillation.cpu().numpy()),
            )
        return replace(
            state,
            scored=np.concatenate([state.scored, np.array(list(sent), dtype=np.int64)]),
            scores=np.concatenate([state.scores, *(row[np.newaxis] for row in sent.values())]),
        )

    def swamped(self, n: int, features: Tensor) -> str | None:
        """A warning if the noise of scores is larger than the largest possible signal.

        The regression's loss at w* is at most that at 0, so ‖w*‖² ≤ 2·ln(2)/λ; D features get
        noise of norm σ·√D. A client with fewer inputs than n has more noise.
        """
        if self.epsilon is None or self.regression == "code":  # there, weights are hardly bounded
            return None
        noise = self.sigma(n) * math.sqrt(features.shape[1])
        signal = math.sqrt(2 * math.log(2) / self.l2)
        if noise <= signal:
            return None
        return (
            f"warning: FedAUX's scores are noise: with {n} inputs, the noise on the regression's "
            f"weights has a norm of {noise:.3g}, and they have {signal:.3g} at most; raise "
            "method.epsilon, or set it to null for scores without noise"
        )

    @client_function("score")
    def score(
        self, client: Client, weights: Tensor, negatives: Tensor, distillation: Tensor
    ) -> Tensor:
        """(client) s_k(x) of each distillation input, (n,), from features under w_0."""
        client.model.load(weights)
        own = represent(client.model, client.data.x)
        return self.scores(own, negatives, distillation, client.rng("noise"))

    def scores(
        self, own: Tensor, negatives: Tensor, distillation: Tensor, rng: np.random.Generator
    ) -> Tensor:
        """(n,) s = sigmoid(⟨w, h̃⟩ + b) + 1e-8 of n features, with w and b perturbed.

        Args:
            own, negatives: (·, D) features of the two classes.
            distillation: (n, D) features to score.
        """
        from sklearn.linear_model import LogisticRegression
        from threadpoolctl import threadpool_limits

        h = torch.cat([own, negatives]).cpu().double().numpy()
        scale = max(np.linalg.norm(h, axis=1).max(), FLOOR)  # all features may be zero
        n, bias = len(h), self.regression == "code"
        C = 1 / self.l2 if bias else 1 / (n * self.l2)  # scikit-learn minimises C·Σ + ‖w‖²/2
        model = LogisticRegression(C=C, fit_intercept=bias, tol=1e-8, max_iter=1000)
        # One thread, because their number may change the last bits.
        with threadpool_limits(1):
            model.fit(h / scale, np.arange(n) < len(own))
            w, b = model.coef_[0], float(model.intercept_[0])
            if self.epsilon is not None:
                sigma = self.sigma(n)
                w = w + sigma * rng.standard_normal(len(w))
                b += sigma * rng.standard_normal() if bias else 0.0
            z = distillation.cpu().double().numpy() / scale @ w + b
        return torch.from_numpy(z).sigmoid().add(FLOOR).float()

    def sigma(self, n: int) -> float:
        """σ of the noise for a regression on n inputs; 2/(n·λ) is its sensitivity."""
        assert self.epsilon is not None
        return math.sqrt(2 * math.log(1.25 / self.delta)) * 2 / (n * self.l2) / self.epsilon


def represent(model: FlatModel, x: Tensor) -> Tensor:
    """(n, D) features of inputs, in eval mode."""
    network = model.module.eval()
    assert isinstance(network, Classifier)
    return in_batches(network.features, x)


def read_features(path: Path, model: FlatModel) -> dict[str, Tensor]:
    """The weights of a network's features in a safetensors file, by name."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExperimentError(f"method.encoder: {path} cannot be read: {error}") from error
    wanted = {n: shape for n, shape in model.shapes.items() if n.startswith("features.")}
    for name, shape in wanted.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise ExperimentError(
                f"method.encoder: {path} has no '{name}' of shape {shape}, which the model's "
                "features need"
                + ("" if found is None else f", but one of shape {found}")
                + "; use the final.safetensors of a run with the same model"
            )
    for name, parameter in model.module.named_parameters():
        frozen = name.startswith("features.") and not parameter.requires_grad
        if frozen and not (name in tensors and torch.equal(parameter.cpu(), tensors[name])):
            raise ExperimentError(
                f"method.encoder: {path} has not the frozen '{name}' of the model, on which its "
                "other layers rest; name the file in train.initial_weights as well"
            )
    return {name: tensors[name] for name in wanted}
