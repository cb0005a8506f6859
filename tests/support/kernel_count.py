"""Count the kernels that a step would launch on a device: operations other than views, and Triton's launches.

Called by tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor


class KernelCount(TorchDispatchMode):
    """Counts launches by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._launch = GridExecutor.__call__

    def __enter__(self) -> KernelCount:
        counted, launch = self.names, self._launch

        def count_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            counted[executor.fn.__name__] += 1
            with _disable_current_modes():
                return launch(executor, *args, **kwargs)

        GridExecutor.__call__ = count_launch
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        GridExecutor.__call__ = self._launch

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        if not operation.is_view and not name.startswith(("empty", "_unsafe_view", "detach")):
            self.names[name] += 1
        return operation(*args, **(kwargs or {}))


def counted(counts: list[Counter[str]]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a `Capture` that counts the launches of each step."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        with torch.inference_mode(), KernelCount() as seen:
            step()
        counts.append(seen.names)
        return step

    return capture
