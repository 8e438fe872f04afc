"""The published formulas, reimplemented one row at a time in float64 with plain autograd."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from gac.rows import Row
from tests.tiny import write_teacher

TEMPERATURE = 1.3
MAX_NEW_TOKENS = 5


class RowTerms(SimpleNamespace):
    """Per-token values of one row under the float64 model; see `row_terms`."""


CLIPS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(["luffy", "hpt", "relift", "trapo"], (math.inf, math.inf)),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
}
"""The clip of the probability ratio; 0.2 on both sides for the other methods."""


def row_terms(
    model, reference, row: Row, name: str = "", old: Tensor | None = None, teacher=None
) -> RowTerms:
    """Evaluate the row's n loss tokens; logp, entropy and log_p are differentiable.

    old: log-probs of the sampling policy; None: on-policy. teacher: a model; None: the policy, if
    the row has a context.
    """
    ids = torch.tensor([row.ids])
    start = max(row.start, 1)
    temperature = 1.0 if row.is_demo else TEMPERATURE
    taught = log_t = None
    if row.context or teacher:
        seen = torch.tensor([row.context + row.ids])
        logits = (teacher or model)(input_ids=seen).logits[0, len(row.context) + start - 1 : -1]
        log_t = (logits / temperature).log_softmax(-1).detach()
        taught = log_t.gather(1, ids[0, start:, None])[:, 0]
    targets = ids[0, start:]
    by_net = {
        net: (net(input_ids=ids).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        for net in {model, reference}  # once if they are the same
    }
    log_p, log_q = by_net[model], by_net[reference]
    logp = log_p.gather(1, targets[:, None])[:, 0]
    switch = len(row.ids) if row.is_demo else max(row.switch, start)
    return RowTerms(
        row=row,
        logp=logp,
        p=logp.detach().exp(),
        a=row.advantage,
        n=len(targets),
        entropy=-(log_p.exp() * log_p).sum(-1),
        log_p=log_p,
        log_q=log_q.detach(),
        ref=log_q.gather(1, targets[:, None])[:, 0].detach(),
        demo=torch.arange(start, len(row.ids)) < switch,
        old=logp.detach() if old is None else old.double(),
        clip=CLIPS.get(name, (0.2, 0.2)),
        teacher=taught,
        log_t=log_t,
    )


# ---- losses, from the papers' equations


def nll(rows: list[RowTerms], weight: Callable[[Tensor], Tensor] = torch.ones_like) -> Tensor:
    """Token mean of -w log p over demonstrations."""
    rows = [r for r in rows if r.row.is_demo]
    return -sum((weight(r.p) * r.logp).sum() for r in rows) / sum(r.n for r in rows)


def phi(p: Tensor) -> Tensor:
    return p * (1 - p)


def policy_gradient(rows: list[RowTerms]) -> Tensor:
    """GRPO: mean over responses of the token mean of the clipped surrogate."""
    rows = [r for r in rows if not r.row.is_demo]
    return sum(surrogate(r).mean() for r in rows) / len(rows)


def constant_sum(parts: list[Tensor], rows: int) -> Tensor:
    """Sum over tokens / (rows * maximum response length), as in LUFFY, HPT and TRAPO."""
    return sum(p.sum() for p in parts) / (rows * MAX_NEW_TOKENS)


def surrogate(r: RowTerms) -> Tensor:
    """-min(A ratio, A clip(ratio)) of each token."""
    return clipped((r.logp - r.old).exp(), r)


def clipped(ratio: Tensor, r: RowTerms) -> Tensor:
    low, high = r.clip
    return -torch.minimum(r.a * ratio, r.a * ratio.clamp(1 - low, 1 + high))


def mixture(mu: float, weight: Callable[[Tensor], Tensor] = torch.ones_like):
    return lambda rows: (1 - mu) * policy_gradient(rows) + mu * nll(rows, weight)


def asft(rows: list[RowTerms]) -> Tensor:
    kl = sum((r.log_q.exp() * (r.log_q - r.log_p)).sum() for r in rows)
    return nll(rows, lambda p: p) + 0.1 * kl / sum(r.n for r in rows)


def dr_grpo(rows: list[RowTerms]) -> Tensor:
    return constant_sum([surrogate(r) for r in rows], len(rows))


def dapo(rows: list[RowTerms]) -> Tensor:
    return sum(surrogate(r).sum() for r in rows) / sum(r.n for r in rows)


def gspo(rows: list[RowTerms]) -> Tensor:
    return sum(clipped((r.logp - r.old).mean().exp(), r) for r in rows) / len(rows)


def preference(rows: list[RowTerms], loss: Callable[[Tensor], Tensor], mean: bool) -> Tensor:
    """Mean over pairs; the preferred response comes first."""
    assert [r.a for r in rows] == [1.0, -1.0] * (len(rows) // 2)
    margins = [(r.logp - r.ref).mean() if mean else (r.logp - r.ref).sum() for r in rows]
    pairs = zip(margins[0::2], margins[1::2], strict=True)
    losses = [loss(preferred - rejected) for preferred, rejected in pairs]
    return sum(losses) / len(losses)


def dpo(rows: list[RowTerms]) -> Tensor:
    return preference(rows, lambda h: -torch.log(torch.sigmoid(0.1 * h)), mean=False)


def ipo(rows: list[RowTerms]) -> Tensor:
    return preference(rows, lambda h: (h - 1.0) ** 2, mean=True)


def multitask(rows: list[RowTerms]) -> Tensor:
    return policy_gradient(rows) + nll(rows)


def luffy(rows: list[RowTerms]) -> Tensor:
    shaped = [-r.a * r.logp.exp() / (r.logp.exp() + 0.1) for r in rows if r.row.is_demo]
    rollouts = [surrogate(r) - 0.001 * r.entropy for r in rows if not r.row.is_demo]
    return constant_sum(shaped + rollouts, len(rows))


def srft(rows: list[RowTerms]) -> Tensor:
    demos = [r for r in rows if r.row.is_demo]
    rollouts = [r for r in rows if not r.row.is_demo]
    assert {r.a for r in rollouts} == {1.0, -1.0}
    sft, rl = [], []
    for r in demos:
        weight = 0.5 * (-r.entropy.mean().detach()).exp()
        sft.append((-weight * r.logp - r.a * r.logp.exp()).sum())
    for r in rollouts:
        weight = 0.1 * r.entropy.mean().detach().exp()
        rl.append((-weight * r.logp if r.a > 0 else r.logp).sum())
    return sum(sft) / sum(r.n for r in demos) + sum(rl) / sum(r.n for r in rollouts)


def hpt(rows: list[RowTerms]) -> Tensor:
    parts = [surrogate(r) - 0.001 * r.entropy for r in rows if not r.row.is_demo]
    assert 0 < len(parts) < len(rows)
    return constant_sum(parts, len(parts)) + nll(rows)


def superrl(rows: list[RowTerms]) -> Tensor:
    assert {r.row.is_demo for r in rows} == {True, False}, (
        "one prompt is solved, and another is not"
    )
    return policy_gradient(rows) + nll(rows)


def routing(rows: list[RowTerms]) -> Tensor:
    rollouts, demos = ([r for r in rows if r.row.is_demo == demo] for demo in (False, True))
    share = len(demos) / (len(demos) + len({r.row.unit for r in rollouts}))
    assert 0 < share < 1, "some prompts are solved, and some are not"
    return (1 - share) * policy_gradient(rollouts) + share * nll(demos)


def relift(rows: list[RowTerms]) -> Tensor:
    rollouts = [r for r in rows if not r.row.is_demo]
    rl = constant_sum([surrogate(r) - 0.001 * r.entropy for r in rollouts], len(rollouts))
    if len(rollouts) == len(rows):  # reused rollouts are not collected again
        return rl
    assert len(rows) - len(rollouts) == 2, "the two newest unsolved prompts"
    return rl + nll(rows)


def dypo(rows: list[RowTerms]) -> Tensor:
    """GRPO / 2 + GAL / 2, over the pairs of successful and failed rollouts of each prompt."""
    rollouts = [r for r in rows if not r.row.is_demo]
    gal = []
    for unit in sorted({r.row.unit for r in rollouts}):
        group = [r for r in rollouts if r.row.unit == unit]
        assert len(group) == 4
        h = [((r.logp - r.ref).sum(), r.a) for r in group]
        wins, losses = [x for x, a in h if a > 0], [x for x, a in h if a < 0]
        pairs = [-torch.log(torch.sigmoid(i - j)) for i in wins for j in losses]
        gal.append(sum(pairs) / len(pairs))
    assert gal
    assert len(rollouts) < len(rows)
    return (policy_gradient(rows) + sum(gal) / len(gal)) / 2 + nll(rows)


def sdar(rows: list[RowTerms]) -> Tensor:
    """GRPO + 0.01 sigmoid(5 D) D, over all tokens."""
    assert not any(r.row.is_demo for r in rows)
    losses = []
    for r in rows:
        gap = r.teacher - r.logp
        gate = 1 / (1 + (-5 * gap.detach()).exp())
        losses.append((surrogate(r) + 0.01 * gate * gap).sum())
    return sum(losses) / sum(r.n for r in rows)


def reverse_kl(r: RowTerms) -> Tensor:
    """KL(policy || teacher) of each token, over the vocabulary."""
    return (r.log_p.exp() * (r.log_p - r.log_t)).sum(-1)


def opd(rows: list[RowTerms]) -> Tensor:
    """GKD with lambda = 1 and the reverse KL: the mean over responses of the token mean."""
    return sum(reverse_kl(r).mean() for r in rows) / len(rows)


def kdrl(rows: list[RowTerms]) -> Tensor:
    """GRPO + 0.005 (log p - log t)^2 / 2, over all tokens."""
    losses = [(surrogate(r) + 0.005 * (r.logp - r.teacher) ** 2 / 2).sum() for r in rows]
    return sum(losses) / sum(r.n for r in rows)


def sdft(rows: list[RowTerms]) -> Tensor:
    """KL(teacher || policy) over the vocabulary: the mean over responses of the token mean."""
    assert all(r.row.context for r in rows)
    kl = [(r.log_t.exp() * (r.log_t - r.log_p)).sum(-1).mean() for r in rows]
    return sum(kl) / len(rows)


def sdpg(rows: list[RowTerms]) -> Tensor:
    """GRPO + 0.001 KL(policy || teacher) + 0.001 (log p - log ref)^2 / 2, over all tokens."""
    assert all(r.row.context for r in rows)
    penalty = [0.001 * (reverse_kl(r) + (r.logp - r.ref) ** 2 / 2) for r in rows]
    losses = [(surrogate(r) + x).sum() for r, x in zip(rows, penalty, strict=True)]
    return sum(losses) / sum(r.n for r in rows)


def trapo(rows: list[RowTerms]) -> Tensor:
    """Demonstrated prefix tokens: -p / max(p, 0.1). Sampled tokens: -A times the ratio."""
    assert any(r.demo.any() and not r.demo.all() for r in rows), "no row has both kinds of tokens"
    assert any(r.row.is_demo for r in rows), "no row is a complete demonstration"
    parts = [torch.where(r.demo, -r.logp.exp() / r.p.clamp(min=0.1), surrogate(r)) for r in rows]
    return constant_sum(parts, len(rows))


def uft(rows: list[RowTerms], coef: float = 0.001) -> Tensor:
    """GRPO on the sampled tokens; `coef` times the token mean of the hints."""
    hints = sum(r.demo.sum() for r in rows)
    assert 0 < hints < sum(r.n for r in rows)
    rl = sum(surrogate(r)[~r.demo].mean() for r in rows) / len(rows)
    return rl - coef * sum(r.logp[r.demo].sum() for r in rows) / hints


def prefix_rft(rows: list[RowTerms]) -> Tensor:
    """Dr. GRPO, with the fifth of each prefix that has the highest entropies."""
    assert sum(bool(r.demo.any()) for r in rows) == len(rows) // 4, "one of each four"
    parts = []
    for r in rows:
        entropy = torch.where(r.demo, r.entropy.detach(), -1)
        kept = entropy.argsort(descending=True)[: math.ceil(0.2 * r.demo.sum())]
        trained = ~r.demo
        trained[kept] = True
        loss = torch.where(r.demo, -r.a * (r.logp - r.logp.detach()).exp(), surrogate(r))
        parts.append(torch.where(trained, loss, 0))
    return constant_sum(parts, len(rows))


LOSSES = {
    **dict.fromkeys(["sft", "sft-light", "sft-best", "sft-then-rl"], nll),
    "dft": lambda rows: nll(rows, lambda p: p),
    "asft": asft,
    "grpo": policy_gradient,
    "dr-grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "dpo": dpo,
    "ipo": ipo,
    "constant": mixture(0.58),
    **dict.fromkeys(["guarded", "constant-alarm"], mixture(0.4)),
    "hpcd": mixture(0.9),
    "wcf": mixture(0.0),
    "chord-mu": mixture(0.9),
    "chord-phi": mixture(0.1, phi),
    "chord": mixture(0.9, phi),
    "reward-threshold": mixture(0.5),
    **dict.fromkeys(["kl-ctrl", "rewvar-ctrl"], mixture(0.58)),
    "amft": mixture(0.8),
    "multitask": multitask,
    "luffy": luffy,
    "srft": srft,
    "hpt": hpt,
    "superrl": superrl,
    "routing": routing,
    "relift": relift,
    "dypo": dypo,
    "sdar": sdar,
    "opd": opd,
    "kdrl": kdrl,
    "sdft": sdft,
    "sdpg": sdpg,
    "trapo": trapo,
    "uft": uft,
    "prefix-rft": prefix_rft,
    **dict.fromkeys(["uncertainty"], lambda rows: 0.5 * nll(rows) + 0.5 * policy_gradient(rows)),
    "dwa": lambda rows: nll(rows) + policy_gradient(rows),
    "famo": mixture(0.5),
    # first update: mu* = alpha_init = 0.7, m = 0.99 * 0.5 + 0.01 * 0.7, prior 0.85, capped at 0.51
    **dict.fromkeys(["gac", "gac-paper"], mixture(0.51, phi)),
    # the constant 0.7, capped at 0.15 from 0.5
    "gac-gated": mixture(0.42),
}


# ---- two gradients: weights in closed form from a, b, c = <s, s>, <s, r>, <r, r>


def mgda(a: float, b: float, c: float) -> tuple[float, float]:
    w = min(max((c - b) / (a + c - 2 * b), 0), 1)
    return w, 1 - w


def pcgrad(a: float, b: float, c: float) -> tuple[float, float]:
    return (1 - b / a, 1 - b / c) if b < 0 else (1, 1)


def cagrad(a: float, b: float, c: float) -> tuple[float, float]:
    """Solve the dual by brute force: min over x of g_w . g_0 + radius |g_0| |g_w|."""
    x = torch.linspace(0, 1, 2_000_001, dtype=torch.float64)
    norm = (x * x * a + 2 * x * (1 - x) * b + (1 - x) ** 2 * c).sqrt()
    reach = 0.5 * 0.5 * math.sqrt(a + 2 * b + c)
    best = x[(0.5 * (x * (a + b) + (1 - x) * (b + c)) + reach * norm).argmin()].item()
    pull = reach / math.sqrt(best**2 * a + 2 * best * (1 - best) * b + (1 - best) ** 2 * c)
    return 0.5 + pull * best, 0.5 + pull * (1 - best)


def nash(a: float, b: float, c: float) -> tuple[float, float]:
    """The unit bisector of the two gradients."""
    norm = math.sqrt(2 + 2 * b / math.sqrt(a * c))
    return 1 / math.sqrt(a) / norm, 1 / math.sqrt(c) / norm


def aligned(a: float, b: float, c: float) -> tuple[float, float]:
    """sqrt(smallest eigenvalue) G^(-1/2) (1/2, 1/2)."""
    values, vectors = torch.linalg.eigh(torch.tensor([[a, b], [b, c]], dtype=torch.float64))
    root = vectors @ torch.diag((values[0] / values).sqrt()) @ vectors.T
    return tuple((root @ torch.tensor([0.5, 0.5], dtype=torch.float64)).tolist())


def moco(a: float, b: float, c: float) -> tuple[float, float]:
    """From (1/2, 1/2): one projected step of size 0.1 on the tracked Gram matrix / its trace."""
    weight = (0.1 * (c - a) / (a + c) / 2 + 1) / 2
    return 0.1 * weight, 0.1 * (1 - weight)  # tracked gradients are 0.1 g after one step


def gradnorm(a: float, b: float, c: float) -> tuple[float, float]:
    """From weights of 1: the larger norm's falls by 0.025 |g| / mean, the other's rises."""
    s, r = math.sqrt(a), math.sqrt(c)
    mean = (s + r) / 2
    s, r = (1 - 0.025 * math.copysign(x / mean, x - mean) for x in (s, r))
    return 2 * s / (s + r), 2 * r / (s + r)


def gradnorm_ctrl(a: float, b: float, c: float) -> tuple[float, float]:
    s, r = math.sqrt(a), math.sqrt(c)
    return s / (s + r), r / (s + r)


def gta(a: float, b: float, c: float) -> tuple[float, float]:
    return (0.0 if b < 0 else 1.0), 1.0


SOLVERS = {
    "mgda": mgda,
    "pcgrad": pcgrad,
    "cagrad": cagrad,
    "nash-mtl": nash,
    "aligned-mtl": aligned,
    "moco": moco,
    "gradnorm": gradnorm,
    "gradnorm-ctrl": gradnorm_ctrl,
    "gta": gta,
    "sdmgrad": None,  # needs the gradients of batch halves; has its own test
}
EXTRA = {
    "sft-then-rl": {"sft_steps": 2},
    "trapo": {"sizes": [1, 1, 1, 1], "trained": [0, 1, 1, 1], "below": [-1, 2, 2, 2]},
    "hpt": {"correct": 0.5},
    **{key: {"correct": 0.5} for key in ["superrl", "routing"]},
    "amft": {"warmup": 0},
    "dypo": {"correct": 0.5},
    "relift": {"correct": 2.0, "buffer": 2},
    "srft": {"correct": 0.3},
    "gac-gated": {"gradient_parts": 2},
}
# With all but one token of the vocabulary, the bin of the others is that one token: the divergences
# are those over the vocabulary.
ALL_BUT_ONE = {"top_k": 17}
TEACHERS: dict[str, dict[str, object]] = {  # `teacher` of the configuration
    "opd": ALL_BUT_ONE,
    "kdrl": {},
    "sdft": ALL_BUT_ONE,
    "sdpg": ALL_BUT_ONE,
}


def teacher_of(name: str, task: Path, out: Path) -> dict[str, dict[str, object]]:
    """The section `teacher` of a run of a method that needs one, with a model of its own."""
    if name not in TEACHERS:
        return {}
    other = {"path": str(write_teacher(task, out / "teacher"))} if name in ("opd", "kdrl") else {}
    return {"teacher": {**TEACHERS[name], **other}}
