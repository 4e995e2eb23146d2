# SPDX-License-Identifier: Apache-2.0
"""Errors on the wire: one table from error classes to gRPC codes, with details a client can act on, and back."""

from __future__ import annotations

import asyncio
from typing import NoReturn, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from adaflash.errors import (
    AdaFlashError,
    BadVersionError,
    CapacityError,
    DamagedVersionError,
    RequestError,
    UnavailableError,
    UnknownVersionError,
)


class MalformedRequestError(AdaFlashError):
    """The bytes of a request are not the message they should be."""


class UnauthenticatedError(AdaFlashError):
    """The call brought no API key, or a wrong one."""


class StreamStalledError(AdaFlashError):
    """A client read nothing for too long while data waited for it."""


class OffsetError(AdaFlashError):
    """A file was asked for from beyond its end."""


class RejectedRequestError(RequestError):
    """A RequestError as a client sees it: the server's own words, and the field they are about."""

    def __init__(self, message: str, field: str) -> None:
        AdaFlashError.__init__(self, message)
        self.field = field
        self.allowed = message


class RpcError(AdaFlashError):
    """A call failed for a reason that is not about the request itself, e.g. DEADLINE_EXCEEDED."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


# What a caller can cause or run into; any other error is ours and ends as INTERNAL.
CODES: tuple[tuple[type[AdaFlashError], grpc.StatusCode], ...] = (
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (MalformedRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (StreamStalledError, grpc.StatusCode.ABORTED),
    (UnknownVersionError, grpc.StatusCode.NOT_FOUND),
    (BadVersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (DamagedVersionError, grpc.StatusCode.DATA_LOSS),
    (OffsetError, grpc.StatusCode.OUT_OF_RANGE),
)
EXPECTED_ERRORS = tuple(error_class for error_class, _ in CODES)


def code_of(error: AdaFlashError) -> grpc.StatusCode:
    """Return the gRPC code of one of EXPECTED_ERRORS."""
    return next(code for error_class, code in CODES if isinstance(error, error_class))


def _details_of(error: AdaFlashError) -> list[Message]:
    """Return the google.rpc details: the field of a bad request, the delay after which a retry may succeed."""
    if isinstance(error, RequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    if isinstance(error, CapacityError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(1, round(error.retry_after_s * 1000)))
        return [retry]
    return []


def to_status(error: AdaFlashError) -> grpc.Status:
    """Return the gRPC status, with details, of one of EXPECTED_ERRORS."""
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error))
    for detail in _details_of(error):
        status.details.add().Pack(detail)
    return rpc_status.to_status(status)


def internal_status() -> grpc.Status:
    """Return the status of a call that failed through no fault of the caller; what failed stays in the log."""
    message = "internal error; the server's log has the details"
    return rpc_status.to_status(status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=message))


async def abort(context: grpc.aio.ServicerContext[object, object], status: grpc.Status) -> NoReturn:
    """End a call with a status; a client that is gone by now counts as a cancellation."""
    try:
        await context.abort_with_status(status)  # type: ignore[attr-defined]  # missing in grpc-stubs
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error
    raise AssertionError("abort_with_status raises")


def error_from_call(error: grpc.RpcError) -> AdaFlashError:
    """Return the error that a failed call stands for, on the client's side."""
    call = cast("grpc.Call", error)  # what grpc raises is the call as well
    code, message = call.code(), call.details() or ""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry = error_details_pb2.RetryInfo()
        if _unpack_detail(call, retry):
            return CapacityError(message, retry.retry_delay.ToMilliseconds() / 1000)
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        bad_request = error_details_pb2.BadRequest()
        if _unpack_detail(call, bad_request):
            return RejectedRequestError(message, bad_request.field_violations[0].field)
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(message)
    return RpcError(f"{code.name}: {message}", code)


def _unpack_detail(call: grpc.Call, into: Message) -> bool:
    status = rpc_status.from_call(call)
    return status is not None and any(detail.Unpack(into) for detail in status.details)
