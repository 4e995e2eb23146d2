# SPDX-License-Identifier: Apache-2.0
"""Typed clients of the gRPC API, asynchronous and synchronous; they speak dataclasses and raise AdaFlashError."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import TracebackType

import grpc

from adaflash.request import Prompt, RequestOutput, SamplingParams
from adaflash.rpc import convert
from adaflash.rpc.convert import ServerInfo
from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc
from adaflash.rpc.status import error_from_call

# Replies are as long as the request allows; the server bounds them.
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class ClientTls:
    """How a client checks the server and shows itself.

    Attributes:
        ca_certs: PEM authorities to trust; None takes the system's.
        certificate: PEM certificate to present (mTLS), with `private_key`.
        private_key: PEM private key of `certificate`.
        server_name: Name to expect in the server's certificate when it is not the address's.
    """

    ca_certs: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = None
    server_name: str | None = None

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """The gRPC form of this."""
        return grpc.ssl_channel_credentials(self.ca_certs, self.private_key, self.certificate)

    @property
    def options(self) -> list[tuple[str, str]]:
        """Channel options that go with the credentials."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _request(prompt: Prompt, params: SamplingParams | None, request_id: str | None) -> pb.GenerateRequest:
    return convert.call_to_pb(prompt, params or SamplingParams(), request_id)


def _has_logprobs(params: SamplingParams | None) -> bool:
    return params is not None and params.logprobs is not None


class GenerateClient:
    """Asynchronous client; use it as `async with GenerateClient(address) as client`.

    Every method raises RequestError, CapacityError (with `retry_after_s`), UnavailableError or RpcError.

    Args:
        address: `host:port`.
        api_key: Sent as a bearer token.
        tls: Switches TLS on.
    """

    def __init__(self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials, options=[*_OPTIONS, *tls.options])
        self._stub = generate_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = _metadata(api_key)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Run a request to its end."""
        request = _request(prompt, params, request_id)
        try:
            reply: pb.GenerateResponse = await self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        return convert.output_from_pb(reply, _has_logprobs(params))

    async def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterate over the deltas of a request; closing the iterator aborts it."""
        request = _request(prompt, params, request_id)
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                yield convert.output_from_pb(message, _has_logprobs(params))
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()

    async def abort(self, *request_ids: str) -> list[str]:
        """Stop requests; return those that were running."""
        request = pb.AbortRequest(request_ids=request_ids)
        try:
            reply: pb.AbortResponse = await self._stub.Abort(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        return list(reply.aborted_request_ids)

    async def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Return what the server serves and how busy it is."""
        request = pb.GetServerInfoRequest()
        try:
            reply: pb.ServerInfo = await self._stub.GetServerInfo(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        return convert.server_info_from_pb(reply)

    async def close(self) -> None:
        """Close the connection; running requests are aborted."""
        await self._channel.close(None)

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SyncGenerateClient:
    """Synchronous client with the methods of GenerateClient; use it as `with SyncGenerateClient(address) as client`.

    Args:
        address: `host:port`.
        api_key: Sent as a bearer token.
        tls: Switches TLS on.
    """

    def __init__(self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials, options=[*_OPTIONS, *tls.options])
        self._stub = generate_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = _metadata(api_key)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """Run a request to its end."""
        request = _request(prompt, params, request_id)
        try:
            reply: pb.GenerateResponse = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        return convert.output_from_pb(reply, _has_logprobs(params))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Iterate over the deltas of a request; closing the iterator aborts it."""
        request = _request(prompt, params, request_id)
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        try:
            for message in call:
                yield convert.output_from_pb(message, _has_logprobs(params))
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()

    def abort(self, *request_ids: str) -> list[str]:
        """Stop requests; return those that were running."""
        request = pb.AbortRequest(request_ids=request_ids)
        try:
            reply: pb.AbortResponse = self._stub.Abort(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        return list(reply.aborted_request_ids)

    def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Return what the server serves and how busy it is."""
        request = pb.GetServerInfoRequest()
        try:
            reply: pb.ServerInfo = self._stub.GetServerInfo(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        return convert.server_info_from_pb(reply)

    def close(self) -> None:
        """Close the connection; running requests are aborted."""
        self._channel.close()

    def __enter__(self) -> SyncGenerateClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
