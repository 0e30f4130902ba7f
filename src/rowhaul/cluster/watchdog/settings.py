"""What a rank tells its watchdog when it starts it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

PURPOSE = "watchdog"  # of connections to the hub, in the proof of the secret


@dataclass(frozen=True)
class Settings:
    """The run as a watchdog needs to know it.

    Attributes:
        rank: whose watchdog it is.
        process: of that rank.
        token: of the run.
        roles: of all ranks.
        addresses: of all ranks.
        listen: on rank 0, the address to listen at.
        interval: seconds between beats.
        num_missed: rounds without a beat, or a word of the hub, after which the other end is lost.
        first_missed: the same before the first beat.
        warn_seconds: without progress, before the ranks that the others wait for are named.
        end_seconds: the same before the run ends; 0: never.
        stacks: whether to log the stacks of ranks that are named.
        proof_seconds: to prove the secret.
        secret: of the run, if it has one.
    """

    rank: int
    process: int
    token: str
    roles: tuple[str, ...]
    addresses: tuple[str, ...]
    listen: str
    interval: float = 1.0
    num_missed: int = 8
    first_missed: int = 15
    warn_seconds: float = 20.0
    end_seconds: float = 1800.0
    stacks: bool = False
    proof_seconds: float = 10.0
    secret: bytes | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "secret": None if self.secret is None else self.secret.hex()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Settings:
        """The inverse of `to_json`."""
        settings = cls(**values)
        secret = None if values["secret"] is None else bytes.fromhex(values["secret"])
        return replace(
            settings, secret=secret, roles=tuple(values["roles"]), addresses=tuple(values["addresses"])
        )
