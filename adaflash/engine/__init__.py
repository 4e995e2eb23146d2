# SPDX-License-Identifier: Apache-2.0
"""The engine: scheduler, runner, step, and the committed-token stream."""
