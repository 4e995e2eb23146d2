# SPDX-License-Identifier: Apache-2.0
"""The `npu` backend: AdaFlash's ops on Huawei Ascend, through torch_npu. Importing it loads no device library."""
