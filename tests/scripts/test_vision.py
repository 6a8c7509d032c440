"""Scripts that train image models, as people write them, plain and wrapped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset
from twice import Numbers, Script, Wrap, differences


def digits(num_samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(num_samples, 1, 16, 16, generator=generator)
    return TensorDataset(images, torch.randint(10, (num_samples,), generator=generator))


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16 * 36, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def digits_with_test_epochs(wrap: Wrap) -> Numbers:
    model = wrap(Digits())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses: list[Tensor] = []
    for _ in range(2):
        model.train()
        for data, target in DataLoader(digits(), batch_size=16, shuffle=True):  # last of 8
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        model.eval()
        with torch.no_grad():
            for data, target in DataLoader(digits(20), batch_size=20):
                losses.append(F.nll_loss(model(data), target, reduction="sum"))
        scheduler.step()
    return [*losses, model]


def generator_net() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def critic_net() -> nn.Module:
    spectral = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        spectral(nn.Conv2d(1, 8, 4, 2, 1, bias=False)), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    )  # fmt: skip


def adversarial(wrap: Wrap) -> Numbers:
    net_g, net_d = wrap(generator_net()), wrap(critic_net())
    for module in (*net_g.modules(), *net_d.modules()):
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion, losses = nn.BCELoss(), []
    for real, _ in DataLoader(digits(), batch_size=10):
        net_d.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        error_real = criterion(net_d(real).view(-1), label)
        error_real.backward()
        fake = net_g(torch.randn(real.size(0), 8, 1, 1))
        label.fill_(0.0)
        error_fake = criterion(net_d(fake.detach()).view(-1), label)
        error_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        error_g = criterion(net_d(fake).view(-1), label)
        error_g.backward()
        optimizer_g.step()
        losses += [error_real.item(), error_fake.item(), error_g.item()]
    return [*losses, net_g, net_d]


def neural_style(wrap: Wrap) -> Numbers:
    net = wrap(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()))
    net.requires_grad_(False)
    image = torch.rand(1, 1, 16, 16).requires_grad_()
    target = torch.rand(1, 8, 12, 12)
    optimizer = torch.optim.LBFGS([image], max_iter=5)
    losses: list[float] = []

    def closure() -> Tensor:
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        features = net(image)
        loss = F.mse_loss(features, target) + features.flatten(2).var(-1).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert image.grad is not None
    holder = nn.Module()
    holder.image = nn.Parameter(image.detach())
    holder.image.grad = image.grad
    return [torch.tensor(losses), holder]


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def moving_averages(wrap: Wrap) -> Numbers:
    model = wrap(small_net())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    scheduler = SWALR(optimizer, swa_lr=0.05)
    loader = DataLoader(digits(), batch_size=20)
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
            ema.update_parameters(model)
        swa.update_parameters(model)
        scheduler.step()
    update_bn(loader, swa)
    ema.eval()
    return [ema(digits().tensors[0]), swa.module, ema.module, model]


@pytest.mark.parametrize(
    "script", [digits_with_test_epochs, adversarial, neural_style, moving_averages]
)
def test_a_script_logs_and_trains_the_same_numbers(script: Script) -> None:
    assert differences(script) == []


def test_a_script_that_trains_other_numbers_is_seen() -> None:
    def one_more_draw(model: nn.Module) -> nn.Module:
        torch.rand(())
        return copy.deepcopy(model)

    assert differences(digits_with_test_epochs, one_more_draw)
