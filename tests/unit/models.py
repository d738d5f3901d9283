"""Small models of the common kinds, data with an offset, and a training loop, shared by tests."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it


def mlp(width: int = 24, momentum: float | None = 0.1) -> nn.Module:
    """Features (N, 10) to three classes, with dropout."""
    return nn.Sequential(
        nn.Linear(10, width, bias=False), nn.BatchNorm1d(width, momentum=momentum), nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width, bias=False), nn.BatchNorm1d(width, momentum=momentum), nn.ReLU(),
        nn.Linear(width, 3),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return F.relu(y)


def resnet() -> nn.Module:
    """Images (N, 3, 12, 12) to three classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        Residual(8, 8, 1), Residual(8, 12, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    """Depthwise and pointwise convolutions; images to three classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


class UNet(nn.Module):
    """One level down and up, joined by concatenation; then averaged to three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(6, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.leave = nn.Sequential(nn.Conv2d(12, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        near = self.enter(x)
        far = self.up(self.deep(F.max_pool2d(near, 2)))
        logits: Tensor = self.head(self.leave(torch.cat([near, far], 1)))
        return logits.mean((2, 3))


class Transformer(nn.Module):
    """Pre-norm encoder layers over features cut into five tokens; layer norm only."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm1": norm(16), "attention": nn.MultiheadAttention(16, 2, batch_first=True),
                "norm2": norm(16), "mlp": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
            })
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = norm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unflatten(1, (5, 2)))
        for layer in self.layers:
            y = layer["norm1"](x)
            x = x + layer["attention"](y, y, y, need_weights=False)[0]
            x = x + layer["mlp"](layer["norm2"](x))
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def grouped() -> nn.Module:
    """Group and instance norm without running statistics."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1, bias=False),
        nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


FEATURES: dict[str, Callable[[], nn.Module]] = {"mlp": mlp}
IMAGES: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "mobilenet": mobilenet, "unet": UNet}
BATCH_NORMED = FEATURES | IMAGES


def features(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(N, 10) with means from −20 to 25 and unequal spreads, and classes that depend on them."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 10, generator=g)
    y = (z[:, 0] > 0).long() + (z[:, 1] * z[:, 2] > 0).long()
    return z * torch.linspace(0.5, 4, 10) + torch.linspace(-20, 25, 10), y


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(N, 3, 12, 12) whose brightness and contrast differ between examples; classes by brightness."""
    g = torch.Generator().manual_seed(seed)
    bright = 4 + 2 * torch.randn(n, 1, 1, 1, generator=g)
    contrast = 0.3 + torch.rand(n, 1, 1, 1, generator=g)
    y = (bright.flatten() > 3).long() + (bright.flatten() > 5).long()
    return torch.randn(n, 3, 12, 12, generator=g) * contrast + bright, y


def data_for(name: str, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What the model of that name takes."""
    return images(n, seed) if name in IMAGES or name == "grouped" else features(n, seed)


def trained(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 200,
    batch: int = 64,
    lr: float = 0.02,
    seed: int = 0,
) -> nn.Module:
    """SGD on batches drawn with replacement; in evaluation mode afterwards."""
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    model.train()
    for _ in range(steps):
        drawn = torch.randint(len(x), (batch,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(model(x[drawn]), y[drawn]).backward()
        optimizer.step()
    return model.eval()


def healthy(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, trained properly on its data."""
    torch.manual_seed(seed)
    x, y = data_for(name, 600)
    return trained(BATCH_NORMED[name](), x, y, steps=200 if name in FEATURES else 60)


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """The batch norms by path."""
    return {p: m for p, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def inputs_of(model: nn.Module, batches: list[Tensor]) -> dict[str, list[Tensor]]:
    """What each batch norm is given, float64, (values, channels), with all batch norms on batch statistics.

    Independent of the library: a deep copy, hooks, and PyTorch's own modes.
    """
    twin = copy.deepcopy(model).eval()
    got: dict[str, list[Tensor]] = {}

    def keep(path: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            got.setdefault(path, []).append(args[0].detach().double().movedim(1, -1).flatten(0, -2))

        return hook

    for path, norm in norms_of(twin).items():
        norm.train()
        norm.register_forward_pre_hook(keep(path))
    with torch.no_grad():
        for batch in batches:
            twin(batch)
    return got
