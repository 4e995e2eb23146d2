# SPDX-License-Identifier: Apache-2.0
"""The gRPC API: server, clients, and what stands between them and the engine."""
