# SPDX-License-Identifier: Apache-2.0
"""An Ascend NPU that is not there: stub CANN libraries for the real torch_npu, and CPU kernels behind its operators."""
