# SPDX-License-Identifier: Apache-2.0
"""Turns the messages of the Trainer service into dataclasses, and back; checks all that comes in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from adaflash.errors import RequestError
from adaflash.rpc.convert import MAX_REQUEST_ID_CHARS, float_from_wire
from adaflash.rpc.feature_blob import features_from_pb, features_to_pb
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.training.manifest import MAX_VERSION, Kind
from adaflash.training.trajectories import RoundCounts, Trajectory
from adaflash.training.version_directory import StoredVersion
from adaflash.training.version_report import MAX_REASON_CHARS, VersionEvent, VersionReport

MAX_SERVER_ID_CHARS = 256
MAX_RECORD_ID_CHARS = 64
_MAX_TOKEN_ID = 2**31 - 1

_KINDS: dict[Kind, pb.VersionKind] = {"FULL": pb.VERSION_KIND_FULL, "DELTA": pb.VERSION_KIND_DELTA}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}
_EVENTS: dict[VersionEvent, pb.VersionEvent] = {
    "staged": pb.VERSION_EVENT_STAGED,
    "refused": pb.VERSION_EVENT_REFUSED,
    "canary": pb.VERSION_EVENT_CANARY,
    "activated": pb.VERSION_EVENT_ACTIVATED,
    "rolled_back": pb.VERSION_EVENT_ROLLED_BACK,
    "bad": pb.VERSION_EVENT_BAD,
}
_EVENT_NAMES = {number: name for name, number in _EVENTS.items()}


@dataclass(frozen=True)
class VersionOffer:
    """A version as its trainer announces it.

    Attributes:
        num_bytes: Of all files but the manifest.
        bad_reason: Set when the version must not be used; the fields below are empty then.
    """

    version: int
    bad_reason: str | None = None
    kind: Kind = "FULL"
    base_version: int | None = None
    target_digest: str = ""
    layout_signature: str = ""
    train_step: int = 0
    num_bytes: int = 0
    manifest_size: int = 0
    manifest_sha256: str = ""


@dataclass(frozen=True)
class VersionSummary:
    """A version as its trainer knows it.

    Attributes:
        is_stored: Whether its weights are still there; the fields below, but `bad_reason`, are empty otherwise.
        kind: FULL, or DELTA when there is a difference from `base_version` too.
        base_version: The version training continued from.
        train_step: Optimizer steps before it.
        num_bytes: Of its files.
        created_at: UTC in ISO 8601.
        metrics: Figures of the trainer.
        bad_reason: Why it must not be used; None when it may.
    """

    version: int
    is_stored: bool
    kind: Kind | None
    base_version: int | None
    train_step: int
    num_bytes: int
    created_at: str
    metrics: Mapping[str, float]
    bad_reason: str | None


@dataclass(frozen=True)
class TrajectoryCounts:
    """What became of the trajectories that the trainer was sent since its start; see `SubmitTrajectoriesResponse`."""

    num_received: int
    num_accepted: int
    num_duplicate: int
    num_dropped: int
    num_invalid: int
    first_invalid: str


@dataclass(frozen=True)
class TrainerStatus:
    """What a trainer has.

    Attributes:
        newest_version: Newest good version; 0 for none.
        active_version: Newest version that a server activated; 0 for none.
        last_good_version: The one before it; 0 for none.
        versions: Oldest first.
        damaged: What is wrong with files of the store, by their name.
        pins: Versions kept whatever their age, by what for.
        servers: The last report of each server, by the server's name.
    """

    package_version: str
    target_digest: str
    newest_version: int
    active_version: int
    last_good_version: int
    versions: list[VersionSummary]
    damaged: Mapping[str, str]
    pins: Mapping[str, int]
    num_subscribers: int
    trajectories: TrajectoryCounts
    servers: Mapping[str, VersionReport]


def offer_to_pb(stored: StoredVersion) -> pb.VersionInfo:
    """Return the announcement of a version."""
    manifest = stored.manifest
    return pb.VersionInfo(
        version=manifest.version,
        kind=_KINDS[manifest.kind],
        base_version=manifest.base_version,
        target_digest=manifest.target_digest,
        layout_signature=manifest.layout_signature,
        train_step=manifest.train_step,
        num_bytes=manifest.num_bytes,
        manifest_size=stored.manifest_size,
        manifest_sha256=stored.manifest_sha256,
        created_at=manifest.created_at,
        metrics=manifest.metrics,
    )


def bad_version_to_pb(version: int, reason: str) -> pb.VersionInfo:
    """Return the announcement that a version must not be used."""
    return pb.VersionInfo(version=version, is_bad=True, bad_reason=reason)


def offer_from_pb(message: pb.VersionInfo) -> VersionOffer:
    """Return the version a trainer announces.

    Raises:
        RequestError: A field is invalid; names it.
    """
    if not 0 < message.version <= MAX_VERSION:
        raise RequestError("version", message.version, f"in [1, {MAX_VERSION}]")
    if message.is_bad:
        return VersionOffer(message.version, bad_reason=message.bad_reason)
    if message.kind not in _KIND_NAMES:
        raise RequestError("kind", message.kind, f"one of {', '.join(_KINDS)}")
    return VersionOffer(
        version=message.version,
        kind=_KIND_NAMES[message.kind],
        base_version=message.base_version if message.HasField("base_version") else None,
        target_digest=message.target_digest,
        layout_signature=message.layout_signature,
        train_step=message.train_step,
        num_bytes=message.num_bytes,
        manifest_size=message.manifest_size,
        manifest_sha256=message.manifest_sha256,
    )


def report_to_pb(report: VersionReport, server_id: str) -> pb.ReportVersionRequest:
    """Return a report for the wire."""
    return pb.ReportVersionRequest(
        server_id=server_id,
        version=report.version,
        event=_EVENTS[report.event],
        acceptance_length=report.acceptance_length,
        num_rounds=report.num_rounds,
        num_verified_tokens=report.num_verified_tokens,
        num_accepted_tokens=report.num_accepted_tokens,
        # What an operating system calls a file need not be Unicode.
        reason=report.reason[:MAX_REASON_CHARS].encode("utf-8", "replace").decode(),
    )


def report_from_pb(message: pb.ReportVersionRequest) -> VersionReport:
    """Return the report in a message.

    Raises:
        RequestError: A field is invalid; names it.
    """
    check_server_id(message.server_id)
    if message.version > MAX_VERSION:
        raise RequestError("version", message.version, f"at most {MAX_VERSION}")
    if message.event not in _EVENT_NAMES:
        raise RequestError("event", message.event, f"one of {', '.join(_EVENTS)}")
    if not 0 <= message.acceptance_length < math.inf:
        raise RequestError("acceptance_length", message.acceptance_length, "finite and >= 0")
    if len(message.reason) > MAX_REASON_CHARS:
        raise RequestError("reason", message.reason, f"at most {MAX_REASON_CHARS} characters")
    return VersionReport(
        version=message.version,
        event=_EVENT_NAMES[message.event],
        acceptance_length=float_from_wire(message.acceptance_length),
        num_rounds=message.num_rounds,
        num_verified_tokens=message.num_verified_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        reason=message.reason,
    )


def check_server_id(server_id: str) -> None:
    """Raise RequestError unless a server has a name of reasonable length."""
    if not 0 < len(server_id) <= MAX_SERVER_ID_CHARS:
        raise RequestError("server_id", server_id, f"1 to {MAX_SERVER_ID_CHARS} characters")


def trajectory_to_pb(trajectory: Trajectory) -> pb.TrajectoryRecord:
    """Return a trajectory for the wire."""
    rounds = pb.DecodeRounds(
        num_verified=[counts.num_verified for counts in trajectory.rounds],
        num_accepted=[counts.num_accepted for counts in trajectory.rounds],
    )
    return pb.TrajectoryRecord(
        request_id=trajectory.request_id,
        sample_index=trajectory.sample_index,
        token_ids=trajectory.token_ids,
        num_prompt_tokens=trajectory.num_prompt_tokens,
        rounds=rounds,
        drafter_version=trajectory.drafter_version,
        target_digest=trajectory.target_digest,
        temperature=trajectory.temperature,
        features=None if trajectory.features is None else features_to_pb(trajectory.features),
        record_id=trajectory.record_id,
    )


def trajectory_from_pb(message: pb.TrajectoryRecord) -> Trajectory:
    """Return the trajectory in a message.

    Raises:
        RequestError: A field is invalid; names it.
    """
    num_tokens = len(message.token_ids)
    if not 0 < len(message.record_id) <= MAX_RECORD_ID_CHARS:
        raise RequestError("record_id", message.record_id, f"1 to {MAX_RECORD_ID_CHARS} characters")
    if len(message.request_id) > MAX_REQUEST_ID_CHARS:
        raise RequestError("request_id", message.request_id, f"at most {MAX_REQUEST_ID_CHARS} characters")
    if not num_tokens or max(message.token_ids) > _MAX_TOKEN_ID:
        raise RequestError("token_ids", f"{num_tokens} ids", f"at least one, each at most {_MAX_TOKEN_ID}")
    if not 0 < message.num_prompt_tokens <= num_tokens:
        raise RequestError("num_prompt_tokens", message.num_prompt_tokens, f"in [1, {num_tokens}], of token_ids")
    if message.drafter_version > MAX_VERSION:
        raise RequestError("drafter_version", message.drafter_version, f"at most {MAX_VERSION}")
    if not 0 <= message.temperature < math.inf:
        raise RequestError("temperature", message.temperature, "finite and >= 0")
    features = features_from_pb(message.features) if message.HasField("features") else None
    if features is not None and len(features.hidden) > num_tokens:
        raise RequestError("features.num_tokens", len(features.hidden), f"at most {num_tokens}, of token_ids")
    return Trajectory(
        request_id=message.request_id,
        sample_index=message.sample_index,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        rounds=_rounds_from_pb(message.rounds),
        drafter_version=message.drafter_version,
        target_digest=message.target_digest,
        temperature=float_from_wire(message.temperature),
        features=features,
        record_id=message.record_id,
    )


def _rounds_from_pb(message: pb.DecodeRounds) -> list[RoundCounts]:
    if len(message.num_verified) != len(message.num_accepted):
        lengths = f"{len(message.num_verified)} and {len(message.num_accepted)} rounds"
        raise RequestError("rounds", lengths, "num_verified and num_accepted of one length")
    rounds = [RoundCounts(*counts) for counts in zip(message.num_verified, message.num_accepted, strict=True)]
    for index, counts in enumerate(rounds):
        if counts.num_accepted > counts.num_verified:
            raise RequestError(f"rounds[{index}].num_accepted", counts.num_accepted, f"<= {counts.num_verified}")
    return rounds


def status_from_pb(message: pb.TrainerStatus) -> TrainerStatus:
    """Return what a trainer says it has.

    Raises:
        RequestError: A field is invalid; names it.
    """
    counts = message.trajectories
    return TrainerStatus(
        package_version=message.package_version,
        target_digest=message.target_digest,
        newest_version=message.newest_version,
        active_version=message.active_version,
        last_good_version=message.last_good_version,
        versions=[_version_from_pb(version) for version in message.versions],
        damaged=dict(message.damaged),
        pins=dict(message.pins),
        num_subscribers=message.num_subscribers,
        trajectories=TrajectoryCounts(
            counts.num_received,
            counts.num_accepted,
            counts.num_duplicate,
            counts.num_dropped,
            counts.num_invalid,
            counts.first_invalid,
        ),
        servers={server.server_id: report_from_pb(server) for server in message.servers},
    )


def _version_from_pb(message: pb.VersionInfo) -> VersionSummary:
    is_stored = bool(message.manifest_sha256)
    bad_reason = message.bad_reason if message.is_bad else None
    if not is_stored:
        return VersionSummary(message.version, False, None, None, 0, 0, "", {}, bad_reason)
    offer = offer_from_pb(_as_good(message))
    return VersionSummary(
        version=offer.version,
        is_stored=True,
        kind=offer.kind,
        base_version=offer.base_version,
        train_step=offer.train_step,
        num_bytes=offer.num_bytes,
        created_at=message.created_at,
        metrics=dict(message.metrics),
        bad_reason=bad_reason,
    )


def _as_good(message: pb.VersionInfo) -> pb.VersionInfo:
    """Return the message without its bad mark, to be read whole."""
    good = pb.VersionInfo()
    good.CopyFrom(message)
    good.is_bad = False
    return good
