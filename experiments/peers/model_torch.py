"""The same GPT in PyTorch, operation for operation.

Shapes: as in `model_jax.py`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, params: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.params = nn.ParameterDict(params)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Transform float `[B, S, D]`."""
        B, S, D = x_BSD.shape
        qkv_TE = self._linear("qkv", self._norm("norm1", x_BSD))
        q_BHSK, k_BHSK, v_BHSK = qkv_TE.reshape(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores_BHSS = q_BHSK @ k_BHSK.transpose(-1, -2) * (D // self.heads) ** -0.5
        future_SS = torch.ones(S, S, dtype=torch.bool).triu(1)
        scores_BHSS = scores_BHSS.masked_fill(future_SS, torch.finfo(scores_BHSS.dtype).min)
        mixed_BHSK = scores_BHSS.softmax(-1) @ v_BHSK
        # A stage's output must not be a view: the zero-bubble schedule detaches it in place.
        x_BSD = x_BSD + self._linear("out", mixed_BHSK.transpose(1, 2)).reshape(B, S, D)
        up_TE = self._linear("up", self._norm("norm2", x_BSD))
        down_TD = self._linear("down", functional.gelu(up_TE, approximate="tanh"))
        return x_BSD + down_TD.reshape(B, S, D)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.params[f"{name}_w"]
        return torch.addmm(self.params[f"{name}_b"], x.reshape(-1, len(weight)), weight)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale, bias = self.params[f"{name}_scale"], self.params[f"{name}_bias"]
        return functional.layer_norm(x, x.shape[-1:], scale, bias)


class Stage(nn.Module):
    """Some blocks; with the embedding before, or the head behind."""

    def __init__(
        self,
        blocks: list[dict[str, Tensor]],
        heads: int,
        stem: dict[str, Tensor] | None,
        head: dict[str, Tensor] | None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(params, heads) for params in blocks])
        self.stem = nn.ParameterDict(stem) if stem else None
        self.head = nn.ParameterDict(head) if head else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens `[B, S]` or `[B, S, D]` to `[B, S, D]` or logits `[B, S, V]`."""
        if self.stem:
            x = functional.embedding(x, self.stem["token"]) + self.stem["position"]
        for block in self.blocks:
            x = block(x)
        if not self.head:
            return x
        B, S, D = x.shape
        scale, bias = self.head["norm_scale"], self.head["norm_bias"]
        x_TD = functional.layer_norm(x.reshape(B * S, D), (D,), scale, bias)
        return (x_TD @ self.head["project_w"]).reshape(B, S, -1)


def make_stage(
    params: dict[str, dict[str, Tensor]], heads: int, index: int, num_stages: int
) -> Stage:
    """A stage of the model, with its own copy of its parameters."""
    stacked = params["body"]
    own = len(next(iter(stacked.values()))) // num_stages

    def copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}

    blocks = [
        copy({name: tensor[k] for name, tensor in stacked.items()})
        for k in range(index * own, (index + 1) * own)
    ]
    return Stage(
        blocks,
        heads,
        copy(params["stem"]) if index == 0 else None,
        copy(params["head"]) if index == num_stages - 1 else None,
    )


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten().long())
