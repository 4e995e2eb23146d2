// SPDX-License-Identifier: Apache-2.0
// What every call needs: the lock, settings, the current device, errors with their text, and Python's callbacks.
#define _GNU_SOURCE
#include "emulator.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t emulator_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t emulator_changed = PTHREAD_COND_INITIALIZER;
int (*run_kernel)(uint64_t);
void (*release_kernel)(uint64_t);

static __thread char message[1024];
static __thread int device = -1;  // a thread has none until it sets one
static int in_use[16];

aclError fail(aclError code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length = snprintf(message, sizeof message, "npu_emulator: ");
  vsnprintf(message + length, sizeof message - length, format, arguments);
  va_end(arguments);
  return code;
}

const char *aclGetRecentErrMsg(void) { return message; }

// Python's errors reach torch_npu as the text of the call that failed.
void npu_emulator_set_error(const char *text) { fail(KERNEL_FAILED, "%s", text); }

void npu_emulator_set_callbacks(int (*run)(uint64_t), void (*release)(uint64_t)) {
  pthread_mutex_lock(&emulator_lock);
  run_kernel = run;
  release_kernel = release;
  pthread_mutex_unlock(&emulator_lock);
}

int64_t setting(const char *name, int64_t fallback) {
  const char *text = getenv(name);
  return text && *text ? strtoll(text, NULL, 10) : fallback;
}

double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// A thread that waits must not hold the GIL: the thread it waits for may have to run a kernel written in Python.
void *release_gil(void) {
  static int (*check)(void);
  static void *(*save)(void);
  if (!save) {
    check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    save = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  }
  return save && check && check() ? save() : NULL;
}

void restore_gil(void *state) {
  static void (*restore)(void *);
  if (!restore) restore = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  if (state) restore(state);
}

static int num_devices(void) {
  int total = (int)setting("NPU_EMULATOR_DEVICES", 1), visible = 0;
  const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!list) return total;
  for (char *end; *list; list = *end == ',' ? end + 1 : end) {
    long id = strtol(list, &end, 10);
    if (end == list || id < 0 || id >= total) break;  // CANN: what follows a wrong number is ignored
    ++visible;
  }
  return visible;
}

int current_device(void) { return device < 0 ? 0 : device; }

aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = num_devices();
  return OK;
}

aclError aclrtGetDevice(int32_t *id) {
  *id = device;
  return device < 0 ? NO_CONTEXT : OK;
}

aclError aclrtSetDevice(int32_t id) {
  int count = num_devices();
  if (id < 0 || id >= count)
    return fail(BAD_ARGUMENT, "device %d does not exist: there are %d (NPU_EMULATOR_DEVICES)", id, count);
  device = id;
  in_use[id] = 1;
  return OK;
}

aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  *active = id >= 0 && id < num_devices() && in_use[id];
  return OK;
}
