// SPDX-License-Identifier: Apache-2.0
// What the device says of itself, and the handles torch_npu makes for an operator's arguments.
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *aclrtGetSocName(void) {
  const char *name = getenv("NPU_EMULATOR_SOC");
  return name && *name ? name : "Ascend910_9391";
}

// The version torch_npu compares with; which paths it takes depends on it.
aclError aclsysGetVersionStr(char *package, char *out) {
  strcpy(out, "8.5.0");
  return OK;
}

aclError aclrtGetErrorVerbose(int32_t device, void *info) { return OK; }

static long contexts[16];

aclError aclrtGetCurrentContext(void **out) {
  *out = &contexts[current_device()];
  return OK;
}

aclError aclrtCreateContext(void **out, int32_t device) {
  *out = &contexts[device];
  return OK;
}

aclError aclrtSetDevice(int32_t device);

aclError aclrtSetCurrentContext(void *context) { return aclrtSetDevice((int32_t)((long *)context - contexts)); }

aclError aclrtGetRunMode(int *mode) {
  *mode = 1;  // the program runs on the host
  return OK;
}

aclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
  *value = 24;  // cores, whatever is asked for
  return OK;
}

aclError aclGetDeviceCapability(uint32_t device, int attribute, int64_t *value) {
  *value = 24;
  return OK;
}

aclError aclGetCannAttribute(int attribute, int32_t *value) {
  *value = 1;  // it has infinities and NaN, and whatever else is asked for
  return OK;
}

static int64_t options[64];  // of the system, such as whether operators are deterministic

aclError aclrtGetSysParamOpt(int option, int64_t *value) {
  if (option < 0 || option >= 64) return fail(BAD_ARGUMENT, "there is no option %d", option);
  *value = options[option];
  return OK;
}

aclError aclrtSetSysParamOpt(int option, int64_t value) {
  if (option < 0 || option >= 64) return fail(BAD_ARGUMENT, "there is no option %d", option);
  options[option] = value;
  return OK;
}

aclError aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

aclError aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
  *flag = 0;
  return OK;
}

aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) {
  *logic = user;
  return OK;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
  *can = 1;
  return OK;
}

// Not "disable" would send torch_npu to the old operators of the graph engine.
size_t aclGetCompileoptSize(int option) { return 64; }

aclError aclGetCompileopt(int option, char *value, size_t size) {
  if (size) snprintf(value, size, "disable");
  return OK;
}

static void *handle(void) {
  void *memory = calloc(1, 64);
  if (!memory) abort();
  return memory;
}

static aclError destroy(void *memory) {
  free(memory);
  return OK;
}

void *aclCreateTensor(const int64_t *shape, uint64_t dims, int dtype, const int64_t *strides, int64_t offset, int format,
                      const int64_t *storage, uint64_t storage_dims, void *data) {
  return handle();
}
void *aclCreateScalar(void *value, int dtype) { return handle(); }
void *aclCreateIntArray(const int64_t *values, uint64_t count) { return handle(); }
void *aclCreateFloatArray(const float *values, uint64_t count) { return handle(); }
void *aclCreateBoolArray(const char *values, uint64_t count) { return handle(); }
void *aclCreateTensorList(const void *values, uint64_t count) { return handle(); }
void *aclCreateScalarList(const void *values, uint64_t count) { return handle(); }
void *aclCreateTensorDesc(int dtype, int dims, const int64_t *shape, int format) { return handle(); }
void *aclCreateDataBuffer(void *data, size_t bytes) { return handle(); }
void *aclopCreateAttr(void) { return handle(); }
aclError aclDestroyTensor(void *tensor) { return destroy(tensor); }
aclError aclDestroyScalar(void *scalar) { return destroy(scalar); }
aclError aclDestroyIntArray(void *array) { return destroy(array); }
aclError aclDestroyFloatArray(void *array) { return destroy(array); }
aclError aclDestroyBoolArray(void *array) { return destroy(array); }
aclError aclDestroyTensorList(void *list) { return destroy(list); }
aclError aclDestroyScalarList(void *list) { return destroy(list); }
