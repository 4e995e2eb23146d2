# SPDX-License-Identifier: Apache-2.0
"""A client in a process of its own, made of generated stubs only; prints what it saw as one JSON object.

Run as `python -m tests.rpc_probe HOST:PORT`.
"""

from __future__ import annotations

import json
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from adaflash.rpc.pb import generate_pb2 as pb
from adaflash.rpc.pb import generate_pb2_grpc


def probe(address: str) -> dict[str, object]:
    """Use every method once, cancel one stream, and return what came back."""
    with grpc.insecure_channel(address) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        services = [
            service.name
            for reply in reflection.ServerReflectionInfo(iter([listing]))
            for service in reply.list_services_response.service
        ]
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="adaflash.v1.Generation")
        (described,) = reflection.ServerReflectionInfo(iter([symbol]))
        health = health_pb2_grpc.HealthStub(channel)
        names = ("", "adaflash.v1.Generation")
        statuses = [health.Check(health_pb2.HealthCheckRequest(service=name)).status for name in names]
        stub = generate_pb2_grpc.GenerationStub(channel)
        request = pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=8))
        messages = list(stub.GenerateStream(request))
        long_request = pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=4000))
        call = stub.GenerateStream(long_request)
        next(call)
        call.cancel()
        return {
            "services": services,
            "described_files": len(described.file_descriptor_response.file_descriptor_proto),
            "health": statuses,
            "streamed": [token for message in messages for token in message.outputs[0].token_ids],
            "finished": [message.finished for message in messages],
            "unary": list(stub.Generate(request).outputs[0].token_ids),
            "model": stub.GetServerInfo(pb.GetServerInfoRequest()).model,
            "aborted": list(stub.Abort(pb.AbortRequest(request_ids=["x"])).aborted_request_ids),
        }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1])))
