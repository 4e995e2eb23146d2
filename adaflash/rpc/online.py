# SPDX-License-Identifier: Apache-2.0
"""What makes a server learn online: trajectories to its trainer, versions from it, and the engine's part in both."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from adaflash.config import EngineConfig, OnlineConfig, cache_dir
from adaflash.engine.async_engine import AsyncEngine
from adaflash.engine.capture import CaptureConfig
from adaflash.engine.loading import LoadProgress, resolve_checkpoints
from adaflash.engine.version_manager import RolloutConfig, VersionManager
from adaflash.errors import ConfigError
from adaflash.models.digest import target_digest
from adaflash.rpc.client import ClientTls
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_convert import offer_from_pb
from adaflash.rpc.trajectory_upload import TrajectoryUploader
from adaflash.rpc.version_client import RetryPolicy, TrainerAddress, VersionClient, open_channel
from adaflash.training.canary import CanaryConfig
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.payload import PayloadChecker
from adaflash.training.staging import StagingArea
from adaflash.training.trajectories import TrajectorySpool

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 5.0
_SEGMENT_BYTES = 4 << 20


class OnlineLearning:
    """Connects one server with its trainer.

    Made before the engine, which captures for it; then `async with online.attached(engine)` around serving.

    Args:
        config: `trainer` is set.
        engine_config: What is served; it has a drafter.
        server_id: This server's name among the trainer's.
        progress: See `load_engine`.

    Raises:
        ConfigError: There is no drafter, or a directory cannot be used.
        CheckpointError: Target or drafter cannot be read.
    """

    def __init__(
        self,
        config: OnlineConfig,
        engine_config: EngineConfig,
        server_id: str,
        progress: LoadProgress | None = None,
    ) -> None:
        assert config.trainer is not None, "there is a trainer to learn from"
        model_dir, draft_dir = resolve_checkpoints(engine_config, progress)
        if draft_dir is None:
            raise ConfigError(f"trainer={config.trainer!r} has no effect without a drafter: give --draft")
        self._config, self._server_id, self._draft_dir = config, server_id, draft_dir
        self._trainer = TrainerAddress(config.trainer, config.trainer_api_key, _tls(config))
        self._canary = CanaryConfig(
            config.canary_fraction,
            config.canary_max_drop,
            config.canary_error_rate,
            config.canary_min_requests,
            config.canary_max_requests,
        )
        digest = target_digest(model_dir)
        self._checker = PayloadChecker(DrafterLayout.of(draft_dir), digest)
        root = cache_dir() / "servers" / server_id if config.online_dir is None else Path(config.online_dir)
        self.staging = StagingArea(root / "versions")
        self.spool = TrajectorySpool(root / "trajectories", config.trajectory_bytes, config.trajectory_age_s)
        self.capture = CaptureConfig(
            self.spool, digest, config.supervision, config.trajectory_sampling_rate, config.trajectory_min_tokens
        )
        self.manager: VersionManager | None = None
        self.versions: VersionClient | None = None
        self.uploader: TrajectoryUploader | None = None
        self._stack = AsyncExitStack()

    async def start(self, engine: AsyncEngine) -> None:
        """Begin: catch up with the trainer for `trainer_wait_s` at most, then go on in the background."""
        started = time.monotonic()
        status = await self._fetch_status()
        rollout = RolloutConfig(self._canary, self._config.drain_timeout_s)
        self.manager = manager = VersionManager(engine, self._draft_dir, self.staging, rollout)
        offer = None
        if status is not None:
            is_bad = any(info.is_bad and info.version == manager.proven for info in status.versions)
            manager.proven = status.active_version if is_bad else max(manager.proven, status.active_version)
            offer = next((offer_from_pb(info) for info in status.versions if info.version == manager.proven), None)
        self.versions = VersionClient(
            self._trainer,
            self._server_id,
            self.staging,
            self._checker,
            manager.take,
            on_bad=manager.revoke,
            proven_version=manager.proven,
            proven_offer=None if offer is None or offer.bad_reason is not None else offer,
        )
        self.uploader = TrajectoryUploader(self._trainer, self.spool)
        await self._stack.enter_async_context(self.versions)
        manager.start(self.versions)
        self._stack.push_async_callback(manager.close)
        await self._stack.enter_async_context(self.uploader)
        if manager.proven:
            left = self._config.trainer_wait_s - (time.monotonic() - started)
            if not await manager.wait_for(manager.proven, left):
                logger.warning(
                    "serving before catching up with the trainer active=%d proven=%d", manager.active, manager.proven
                )

    async def close(self) -> None:
        """Stop; what is half done goes on at the next start."""
        await self._stack.aclose()
        await asyncio.to_thread(self.spool.close)
        self.staging.close()

    async def _fetch_status(self) -> pb.TrainerStatus | None:
        """Return what the trainer has; None when it is not there."""
        channel = open_channel(self._trainer, RetryPolicy(), _STATUS_TIMEOUT_S)
        try:
            stub = trainer_pb2_grpc.TrainerStub(channel)  # type: ignore[no-untyped-call]
            token = self._trainer.token
            metadata = () if token is None else (("authorization", f"Bearer {token}"),)
            status: pb.TrainerStatus = await stub.GetStatus(
                pb.GetTrainerStatusRequest(), metadata=metadata, timeout=_STATUS_TIMEOUT_S
            )
            return status
        except grpc.aio.AioRpcError as error:
            logger.warning(
                "the trainer does not say what it has trainer=%s reason=%s: %s",
                self._trainer.address,
                error.code().name,
                error.details(),
            )
            return None
        finally:
            await channel.close(None)


def default_server_id(grpc_port: int) -> str:
    """Return the name of a server that was given none: its host and port, the same after a restart."""
    return f"{socket.gethostname()}-{grpc_port}"


def _tls(config: OnlineConfig) -> ClientTls | None:
    if config.trainer_ssl_ca_certs is None:
        return None
    certificate, key = config.trainer_ssl_certfile, config.trainer_ssl_keyfile
    return ClientTls(
        Path(config.trainer_ssl_ca_certs).read_bytes(),
        None if certificate is None else Path(certificate).read_bytes(),
        None if key is None else Path(key).read_bytes(),
    )
