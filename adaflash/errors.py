# SPDX-License-Identifier: Apache-2.0
"""Every error a user can cause, as one small hierarchy; programmer errors stay `assert`s."""

from __future__ import annotations


class AdaFlashError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(AdaFlashError):
    """A flag, a config key or a combination of them is wrong."""


class RequestError(AdaFlashError):
    """A request is invalid; says which field, its value and what is allowed.

    Args:
        field: Name of the field as the user spells it, e.g. `top_p`.
        value: The offending value; shortened when long.
        allowed: What would have been accepted, e.g. `in (0, 1]`.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}={shown} is invalid: must be {allowed}")
        self.field = field
        self.allowed = allowed


class CheckpointError(AdaFlashError):
    """A checkpoint is missing, corrupt, or does not fit; names the file, tensor or key."""


class BackendError(AdaFlashError):
    """A backend cannot be loaded or lacks something; names what is installed and what is missing."""


class CapacityError(AdaFlashError):
    """The server is full; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(AdaFlashError):
    """The server is draining or its engine has stopped; the request was not accepted."""


class WeightError(AdaFlashError):
    """A version of the drafter's weights cannot be published, delivered or used; names version, file or tensor."""


class PayloadError(WeightError):
    """A version does not fit the drafter being served; its bytes are those that were published."""


class UnknownVersionError(WeightError):
    """There is no such version, or no such file in it; it may have been removed since."""


class BadVersionError(WeightError):
    """The version was marked bad: it is never handed out again."""


class DamagedVersionError(WeightError):
    """The version's files on disk are not those that were published."""
