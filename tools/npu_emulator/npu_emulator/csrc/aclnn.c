// SPDX-License-Identifier: Apache-2.0
// Operators (aclnn*) have no body here. Their kernels stand in Python; while one of those lets torch_npu's host code
// run, the operators that code calls are accepted and noted. At any other time a call is an error that names it.
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int armed;
static __thread char called[1024];

int npu_emulator_aclnn(const char *name) {
  static const char suffix[] = "GetWorkspaceSize";
  size_t length = strlen(name), end = sizeof suffix - 1;
  int prepares = length > end && !strcmp(name + length - end, suffix);
  int shown = (int)(prepares ? length - end : length);
  if (!armed)
    return fail(NO_KERNEL, "there is no kernel for %.*s: the operator that calls it has to be added to the emulator",
                shown, name);
  size_t used = strlen(called);
  if (prepares) snprintf(called + used, sizeof called - used, "%s%.*s", used ? "," : "", shown, name);
  return OK;
}

void npu_emulator_arm(void) {
  if (!armed++) called[0] = 0;
}

// Returns the operators that were called since npu_emulator_arm, separated by commas.
const char *npu_emulator_disarm(void) {
  armed -= 1;
  return called;
}

// A call of the runtime that nothing here stands for. Success would be a lie, so it is an error that names the call.
int npu_emulator_unknown(const char *name) { return fail(NOT_EMULATED, "%s is not emulated", name); }
