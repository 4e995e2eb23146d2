# SPDX-License-Identifier: Apache-2.0
"""What every call passes on its way in and out: authentication, strict parsing, and one mapping of errors."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from adaflash.errors import RequestError
from adaflash.rpc import status
from adaflash.rpc.pb import generate_pb2 as pb

logger = logging.getLogger(__name__)

OWN_PACKAGE = pb.DESCRIPTOR.package
OPEN_METHODS_PREFIX = "/grpc.health."

Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Behavior: TypeAlias = "Callable[[object, Context], object]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


class CallObserver(Protocol):
    """Told about every call that ended."""

    def call_finished(self, method: str, code: str) -> None:
        """Take the method and the name of the gRPC code."""


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # grpc-stubs
    """Lets in calls with `authorization: Bearer <key>`; the health service stays open, for probes send no metadata."""

    def __init__(self, api_key: str) -> None:
        self._expected = f"Bearer {api_key}".encode()

    async def intercept_service(  # type: ignore[override]  # None: no such method
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        if handler_call_details.method.startswith(OPEN_METHODS_PREFIX) or self._is_known(handler_call_details):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse_unauthenticated)  # fits every kind of call

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        metadata = dict(details.invocation_metadata or ())
        given = metadata.get("authorization", "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(given_bytes, self._expected)


async def _refuse_unauthenticated(requests: object, context: Context) -> None:
    raise status.UnauthenticatedError("a valid API key is needed: send metadata `authorization: Bearer <key>`")


class BoundaryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # grpc-stubs
    """Turns malformed bytes, unknown fields and errors into statuses; nothing leaves as UNKNOWN.

    Must be the outermost interceptor, so that what the others raise passes here too.
    """

    def __init__(self, observer: CallObserver | None = None) -> None:
        self._observer = observer

    async def intercept_service(  # type: ignore[override]  # None: no such method
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wrap the handler of the call; a method that does not exist stays UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        kind = _kind_of(handler)

        async def call(request: object, context: Context) -> object:
            async with self._guard(method, context):
                checked = _checked_stream(request) if handler.request_streaming else _checked(request)
                return await _run(kind.behavior, checked, context)

        return kind.factory(call, _lenient(handler.request_deserializer), handler.response_serializer)

    @asynccontextmanager
    async def _guard(self, method: str, context: Context) -> AsyncIterator[None]:
        code = grpc.StatusCode.OK.name
        try:
            yield
        except grpc.aio.InternalError as error:
            # A write to a client that is gone; its cancellation is on its way.
            code = grpc.StatusCode.CANCELLED.name
            raise asyncio.CancelledError from error
        except status.EXPECTED_ERRORS as error:
            code = status.code_of(error).name
            logger.debug("call refused method=%s code=%s", method, code)
            await status.abort(context, status.to_status(error))
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED.name
            raise
        except grpc.aio.AbortError:
            code = context.code().name if isinstance(context.code(), grpc.StatusCode) else "ABORTED_BY_SERVICE"
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL.name
            logger.exception("call failed method=%s", method)
            await status.abort(context, status.internal_status())
        finally:
            if self._observer is not None:
                self._observer.call_finished(method, code)


class _Kind(NamedTuple):
    behavior: Behavior
    factory: Callable[..., Handler]


def _kind_of(handler: Handler) -> _Kind:
    if handler.unary_unary is not None:
        return _Kind(cast("Behavior", handler.unary_unary), grpc.unary_unary_rpc_method_handler)
    if handler.unary_stream is not None:
        return _Kind(cast("Behavior", handler.unary_stream), grpc.unary_stream_rpc_method_handler)
    if handler.stream_unary is not None:
        return _Kind(cast("Behavior", handler.stream_unary), grpc.stream_unary_rpc_method_handler)
    assert handler.stream_stream is not None, "a handler has one behaviour"
    return _Kind(cast("Behavior", handler.stream_stream), grpc.stream_stream_rpc_method_handler)


async def _run(behavior: Behavior, request: object, context: Context) -> object:
    result = behavior(request, context)
    if inspect.isasyncgen(result):
        async for message in result:
            await context.write(message)
        return None
    assert inspect.isawaitable(result), "handlers are coroutines or async generators"
    return await result


def _lenient(deserialize: Callable[[bytes], object] | None) -> Callable[[bytes], object] | None:
    """Return a deserializer that gives back the error as its value: what one raises ends as UNKNOWN inside grpc."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            return status.MalformedRequestError(f"the request of {len(data)} bytes cannot be parsed: {error}")

    return parse


def _checked(request: object) -> object:
    if isinstance(request, status.MalformedRequestError):
        raise request
    if isinstance(request, Message) and request.DESCRIPTOR.file.package == OWN_PACKAGE:
        check_unknown_fields(request)
    return request


async def _checked_stream(requests: object) -> AsyncIterator[object]:
    assert isinstance(requests, AsyncIterator), "streamed requests are iterated over"
    async for request in requests:
        yield _checked(request)


def check_unknown_fields(message: Message, path: str = "") -> None:
    """Raise RequestError when the message, or one inside it, has a field this server does not know.

    A newer client may ask for something that would be ignored silently; better to refuse it by name.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = f"{path}field {unknown[0].field_number} of {message.DESCRIPTOR.full_name}"
        raise RequestError(name, "unknown", f"a field of {message.DESCRIPTOR.file.name}; client and server differ")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for child in value if field.is_repeated else (value,):
            check_unknown_fields(child, f"{path}{field.name}.")
