// A libnvidia-ml.so.1 without a GPU: the functions that stoker/measuring/gpu.py asks for, with NVML's own signatures.
// The answers are read anew for each question from the file $NVML_STUB, one "gpu key value" a line, "*" for all GPUs;
// "gpu fail.<function> code" makes a function return an error code; a number that is not given is not supported (3).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct { int index; } gpu_t;
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { unsigned long long total, free, used; } memory_t;

static int initialised;
static gpu_t gpus[8];

static int look_up(int gpu, const char *key, char *value) {
  char line[256], who[16], name[96];
  int found = 0;
  FILE *file = fopen(getenv("NVML_STUB"), "r");
  while (file && fgets(line, sizeof line, file)) {
    char text[128];
    if (sscanf(line, "%15s %95s %127[^\n]", who, name, text) == 3 && !strcmp(name, key) &&
        (!strcmp(who, "*") || atoi(who) == gpu)) {
      strcpy(value, text);
      found = 1;
    }
  }
  if (file) fclose(file);
  return found;
}

static int failure(int gpu, const char *function) {
  char key[96], value[128];
  snprintf(key, sizeof key, "fail.%s", function);
  return look_up(gpu, key, value) ? atoi(value) : initialised ? SUCCESS : UNINITIALIZED;
}

static int number(int gpu, const char *key, unsigned long long *out) {
  char value[128];
  if (!look_up(gpu, key, value)) return NOT_SUPPORTED;
  *out = strtoull(value, NULL, 0);
  return SUCCESS;
}

static int small_number(int gpu, const char *function, const char *key, unsigned *out) {
  unsigned long long value = 0;
  int code = failure(gpu, function);
  if (!code) code = number(gpu, key, &value);
  if (!code) *out = (unsigned)value;
  return code;
}

static int text(int gpu, const char *function, const char *key, char *out, unsigned size) {
  char value[128];
  int code = failure(gpu, function);
  if (code) return code;
  if (!look_up(gpu, key, value)) return NOT_SUPPORTED;
  snprintf(out, size, "%s", value);
  return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "error"; }

int nvmlInitWithFlags(unsigned flags) {
  int code;
  (void)flags;
  initialised = 1;
  code = failure(-1, "nvmlInit");
  initialised = code == SUCCESS;
  for (int i = 0; i < 8; i++) gpus[i].index = i;
  return code;
}

int nvmlDeviceGetCount_v2(unsigned *count) { return small_number(-1, "nvmlDeviceGetCount", "count", count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
  unsigned count = 0;
  nvmlDeviceGetCount_v2(&count);
  if (index >= count) return INVALID_ARGUMENT;
  *gpu = &gpus[index];
  return failure((int)index, "nvmlDeviceGetHandleByIndex");
}

int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *index) {
  *index = (unsigned)gpu->index;
  return failure(gpu->index, "nvmlDeviceGetIndex");
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *out, unsigned size) {
  return text(gpu->index, "nvmlDeviceGetUUID", "uuid", out, size);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu) {
  char value[128];
  for (int i = 0; i < 8; i++)
    if (look_up(i, "mig", value) && !strcmp(value, uuid)) {
      *gpu = &gpus[i];
      return SUCCESS;
    }
  return NOT_FOUND;
}

int nvmlDeviceGetName(gpu_t *gpu, char *out, unsigned size) {
  return text(gpu->index, "nvmlDeviceGetName", "name", out, size);
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  return text(-1, "nvmlSystemGetDriverVersion", "driver", out, size);
}

int nvmlSystemGetCudaDriverVersion(int *version) {
  return small_number(-1, "nvmlSystemGetCudaDriverVersion", "cuda", (unsigned *)version);
}

int nvmlDeviceGetUtilizationRates(gpu_t *gpu, utilisation_t *out) {
  return small_number(gpu->index, "nvmlDeviceGetUtilizationRates", "utilisation", &out->gpu);
}

int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *out) {
  int code = failure(gpu->index, "nvmlDeviceGetMemoryInfo");
  if (!code) code = number(gpu->index, "memory_total", &out->total);
  if (!code) code = number(gpu->index, "memory_used", &out->used);
  return code;
}

int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *out) {
  return small_number(gpu->index, "nvmlDeviceGetPowerUsage", "power_mw", out);
}

int nvmlDeviceGetEnforcedPowerLimit(gpu_t *gpu, unsigned *out) {
  return small_number(gpu->index, "nvmlDeviceGetEnforcedPowerLimit", "power_limit_mw", out);
}

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned type, unsigned *out) {
  return small_number(gpu->index, "nvmlDeviceGetClockInfo", type == 1 ? "sm_clock" : "other_clock", out);
}

int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *out) {
  (void)sensor;
  return small_number(gpu->index, "nvmlDeviceGetTemperature", "temperature", out);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *gpu, unsigned long long *out) {
  int code = failure(gpu->index, "nvmlDeviceGetCurrentClocksThrottleReasons");
  return code ? code : number(gpu->index, "throttle", out);
}
