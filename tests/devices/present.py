"""The devices that tests are run on: one made of the CPU, and a GPU if there is one."""

from __future__ import annotations

import torch
from torch.utils import backend_registration

DEVICES = ["cuda"] if torch.cuda.is_available() else []

if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    from tests.devices import accelerator

    # Here, while tests are collected: the first backward pass of the process looks for devices.
    DEVICES.append(accelerator.start())
