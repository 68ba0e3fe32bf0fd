// A libnvidia-ml.so.1 without a GPU: the functions that stoker_watch/recording/telemetry/{gpu,nvml,sampler}.py call, with
// NVML's own signatures. `tests/nvml.py` compiles it and writes its scenes; `benchmarks/diagnosis/diagnose_driver.py` uses it too,
// so its keys must keep their meaning. Its answers were never compared with a real driver.
//
// The answers are read from the file $NVML_STUB whenever it changes. A line is `gpu key value`, or `@t gpu key value` for
// one that is valid from t seconds on, counted from $NVML_STUB_START (Unix time) or from the loading of the library; the
// last valid line is the answer. gpu: a number; `*`: all; `-1`: the driver; `0.1`: slice 1 of GPU 0 (MIG), which exists
// if it has a `uuid`, and which `*` does not include. A value that is not given is not supported (3).
//
//   count driver cuda name uuid memory_total memory_used utilization memory_utilization power_mw power_limit_mw
//   energy_mj sm_clock memory_clock sm_clock_max memory_clock_max temperature throttle pcie_generation
//   pcie_generation_max pcie_width pcie_width_max pcie_sent_kb pcie_received_kb ecc_corrected ecc_uncorrected mig_mode
//   virtualization instance
//   processes        PIDs, separated by commas, each with `:bytes` if its memory is known; `none`
//   persistence compute_mode bus_id rows_pending rows_failed
//   gpm              1: has GPM counters; gpm.<number of the metric>: their values, in NVML's units
//   xid              each line that becomes valid is one error, delivered to a waiting process; ecc_event: the same, memory
//   fail.<function>  the function returns this code; 15: the GPU is lost
//   hang.<function>  the function does not return while this is valid
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <pthread.h>

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
  TIMEOUT = 10, VERSION_MISMATCH = 25,
};
enum { GPUS = 8, SLICES = 8, LINES = 20000, DRIVER = -1, WHOLE = -1 };
enum { XID_EVENT = 8, ECC_EVENT = 2 };

typedef struct { int gpu, slice; } gpu_t;
typedef struct { double from_s; char who[16], key[72], value[136]; } line_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute_instance; } process_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long types[GPUS]; int told[GPUS][2]; } events_t;
typedef struct { gpu_t *gpu; unsigned long long type, data; unsigned instance, compute_instance; } event_t;
typedef struct { gpu_t *gpu; double at_s; } sample_t;
typedef struct { unsigned number; int code; double value; char *short_name, *long_name, *unit; } metric_t;
typedef struct { unsigned version, count; sample_t *older, *newer; metric_t metrics[]; } question_t;

static gpu_t gpus[GPUS][SLICES + 1];  // the last of each is the whole
static int initialized;
static double start_s;
static line_t *lines;
static int line_count;
static struct stat read_as;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

__attribute__((constructor)) static void begin(void) {
  const char *told = getenv("NVML_STUB_START");
  start_s = told ? atof(told) : now_s();
  for (int gpu = 0; gpu < GPUS; gpu++)
    for (int slice = 0; slice <= SLICES; slice++) gpus[gpu][slice] = (gpu_t){gpu, slice < SLICES ? slice : WHOLE};
}

static void read_scene(void) {
  const char *path = getenv("NVML_STUB");
  struct stat is;
  char text[300];
  FILE *file;
  if (!path || stat(path, &is)) return;
  if (lines && is.st_ino == read_as.st_ino && is.st_size == read_as.st_size &&
      is.st_mtim.tv_sec == read_as.st_mtim.tv_sec && is.st_mtim.tv_nsec == read_as.st_mtim.tv_nsec)
    return;
  if (!(file = fopen(path, "r"))) return;
  if (!lines) lines = malloc(sizeof(line_t) * LINES);
  line_count = 0;
  read_as = is;
  while (line_count < LINES && fgets(text, sizeof text, file)) {
    line_t *line = &lines[line_count];
    line->from_s = -1e18;
    if (sscanf(text, "@%lf %15s %71s %135[^\n]", &line->from_s, line->who, line->key, line->value) == 4 ||
        sscanf(text, "%15s %71s %135[^\n]", line->who, line->key, line->value) == 3)
      line_count++;
  }
  fclose(file);
}

static void name_of(int gpu, int slice, char *name) {
  if (slice == WHOLE) snprintf(name, 16, "%d", gpu);
  else snprintf(name, 16, "%d.%d", gpu, slice);
}

// The number of lines of this key that hold, up to `most`; the last one's value goes into `value`.
static int look_up_to(int most, int gpu, int slice, const char *key, char *value) {
  char who[16];
  int found = 0;
  name_of(gpu, slice, who);
  pthread_mutex_lock(&lock);
  read_scene();
  double t = now_s() - start_s;
  for (int i = 0; i < line_count && found < most; i++)
    if (lines[i].from_s <= t && !strcmp(lines[i].key, key) &&
        (!strcmp(lines[i].who, who) || (slice == WHOLE && !strcmp(lines[i].who, "*")))) {
      if (value) strcpy(value, lines[i].value);
      found++;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

static int look_up(int gpu, int slice, const char *key, char *value) {
  return look_up_to(LINES, gpu, slice, key, value);
}

static int failure(int gpu, int slice, const char *function) {
  char key[96], value[136];
  snprintf(key, sizeof key, "hang.%s", function);
  while (look_up(gpu, slice, key, value) && atoi(value)) usleep(2000);
  snprintf(key, sizeof key, "fail.%s", function);
  return look_up(gpu, slice, key, value) ? atoi(value) : initialized ? SUCCESS : UNINITIALIZED;
}

static int number(const gpu_t *gpu, const char *key, unsigned long long *out) {
  char value[136];
  if (!look_up(gpu->gpu, gpu->slice, key, value)) return NOT_SUPPORTED;
  *out = strtoull(value, NULL, 0);
  return SUCCESS;
}

static int big(const gpu_t *gpu, const char *function, const char *key, unsigned long long *out) {
  int code = failure(gpu->gpu, gpu->slice, function);
  return code ? code : number(gpu, key, out);
}

static int small(const gpu_t *gpu, const char *function, const char *key, unsigned *out) {
  unsigned long long value = 0;
  int code = big(gpu, function, key, &value);
  if (!code) *out = (unsigned)value;
  return code;
}

static int text(const gpu_t *gpu, const char *function, const char *key, char *out, unsigned size) {
  char value[136];
  int code = failure(gpu->gpu, gpu->slice, function);
  if (code) return code;
  if (!look_up(gpu->gpu, gpu->slice, key, value)) return NOT_SUPPORTED;
  snprintf(out, size, "%s", value);
  return SUCCESS;
}

static const gpu_t driver = {DRIVER, WHOLE};

const char *nvmlErrorString(int code) {
  switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case 15: return "GPU is lost";
    default: return "error";
  }
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  initialized = 1;
  int code = failure(DRIVER, WHOLE, "nvmlInit");
  initialized = code == SUCCESS;
  return code;
}

// --- which GPUs there are

int nvmlDeviceGetCount_v2(unsigned *count) { return small(&driver, "nvmlDeviceGetCount", "count", count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
  unsigned count = 0;
  nvmlDeviceGetCount_v2(&count);
  if (index >= count) return INVALID_ARGUMENT;
  *gpu = &gpus[index][SLICES];
  return failure((int)index, WHOLE, "nvmlDeviceGetHandleByIndex");
}

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu) {
  char value[136];
  for (int i = 0; i < GPUS; i++)
    for (int slice = 0; slice <= SLICES; slice++)
      if (look_up(i, gpus[i][slice].slice, "uuid", value) && !strcmp(value, uuid)) {
        *gpu = &gpus[i][slice];
        return SUCCESS;
      }
  return NOT_FOUND;
}

int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned *now, unsigned *pending) {
  int code = small(gpu, "nvmlDeviceGetMigMode", "mig_mode", now);
  *pending = *now;
  return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *gpu, unsigned index, gpu_t **slice) {
  if (index >= SLICES || !look_up(gpu->gpu, (int)index, "uuid", NULL)) return NOT_FOUND;
  *slice = &gpus[gpu->gpu][index];
  return failure(gpu->gpu, WHOLE, "nvmlDeviceGetMigDeviceHandleByIndex");
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu_t *slice, gpu_t **gpu) {
  if (slice->slice == WHOLE) return INVALID_ARGUMENT;
  *gpu = &gpus[slice->gpu][SLICES];
  return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(gpu_t *slice, unsigned *id) {
  return small(slice, "nvmlDeviceGetGpuInstanceId", "instance", id);
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *out, unsigned size) { return text(gpu, "nvmlDeviceGetUUID", "uuid", out, size); }
int nvmlDeviceGetName(gpu_t *gpu, char *out, unsigned size) { return text(gpu, "nvmlDeviceGetName", "name", out, size); }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  return text(&driver, "nvmlSystemGetDriverVersion", "driver", out, size);
}

int nvmlSystemGetCudaDriverVersion(int *version) {
  return small(&driver, "nvmlSystemGetCudaDriverVersion", "cuda", (unsigned *)version);
}

// --- counters

int nvmlDeviceGetUtilizationRates(gpu_t *gpu, utilization_t *out) {
  int code = small(gpu, "nvmlDeviceGetUtilizationRates", "utilization", &out->gpu);
  if (!code && small(gpu, "nvmlDeviceGetUtilizationRates", "memory_utilization", &out->memory)) out->memory = 0;
  return code;
}

int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *out) {
  int code = big(gpu, "nvmlDeviceGetMemoryInfo", "memory_total", &out->total);
  if (!code) code = number(gpu, "memory_used", &out->used);
  return code;
}

#define SMALL(function, key) \
  int function(gpu_t *gpu, unsigned *out) { return small(gpu, #function, key, out); }
SMALL(nvmlDeviceGetPowerUsage, "power_mw")
SMALL(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
SMALL(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
SMALL(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max")
SMALL(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
SMALL(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
SMALL(nvmlDeviceGetPersistenceMode, "persistence")
SMALL(nvmlDeviceGetComputeMode, "compute_mode")

#define BIG(function, key) \
  int function(gpu_t *gpu, unsigned long long *out) { return big(gpu, #function, key, out); }
BIG(nvmlDeviceGetTotalEnergyConsumption, "energy_mj")
BIG(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle")
BIG(nvmlDeviceGetVirtualizationMode, "virtualization")

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned type, unsigned *out) {
  return small(gpu, "nvmlDeviceGetClockInfo", type == 1 ? "sm_clock" : type == 2 ? "memory_clock" : "-", out);
}

int nvmlDeviceGetMaxClockInfo(gpu_t *gpu, unsigned type, unsigned *out) {
  return small(gpu, "nvmlDeviceGetMaxClockInfo", type == 1 ? "sm_clock_max" : type == 2 ? "memory_clock_max" : "-", out);
}

int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *out) {
  (void)sensor;
  return small(gpu, "nvmlDeviceGetTemperature", "temperature", out);
}

int nvmlDeviceGetPcieThroughput(gpu_t *gpu, unsigned counter, unsigned *out) {
  return small(gpu, "nvmlDeviceGetPcieThroughput", counter ? "pcie_received_kb" : "pcie_sent_kb", out);
}

int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, unsigned type, unsigned counter, unsigned long long *out) {
  (void)counter;
  return big(gpu, "nvmlDeviceGetTotalEccErrors", type ? "ecc_uncorrected" : "ecc_corrected", out);
}

int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, process_t *out) {
  char value[136], *rest = NULL;
  unsigned found = 0;
  process_t all[32];
  int code = text(gpu, "nvmlDeviceGetComputeRunningProcesses", "processes", value, sizeof value);
  if (code) return code;
  for (char *word = strtok_r(value, ", ", &rest); word && found < 32; word = strtok_r(NULL, ", ", &rest))
    if (atoi(word)) {
      const char *bytes = strchr(word, ':');
      all[found++] = (process_t){(unsigned)atoi(word), bytes ? strtoull(bytes + 1, NULL, 0) : 0, ~0u, ~0u};
    }
  if (found && (!out || *count < found)) code = INSUFFICIENT_SIZE;
  if (!code && found) memcpy(out, all, found * sizeof *all);
  *count = found;
  return code;
}

int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  int code = small(gpu, "nvmlDeviceGetRemappedRows", "rows_pending", pending);
  *corrected = *uncorrected = *failed = 0;
  if (!code) small(gpu, "nvmlDeviceGetRemappedRows", "rows_failed", failed);
  return code;
}

int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *out) {
  return text(gpu, "nvmlDeviceGetPciInfo", "bus_id", out->bus_id, sizeof out->bus_id);
}

// --- errors, told to who waits

int nvmlEventSetCreate(events_t **events) {
  *events = calloc(1, sizeof **events);
  return failure(DRIVER, WHOLE, "nvmlEventSetCreate");
}

int nvmlEventSetFree(events_t *events) {
  free(events);
  return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(gpu_t *gpu, unsigned long long *types) {
  *types = XID_EVENT | ECC_EVENT | 1;
  return failure(gpu->gpu, gpu->slice, "nvmlDeviceGetSupportedEventTypes");
}

int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long types, events_t *events) {
  if (gpu->slice != WHOLE) return INVALID_ARGUMENT;
  events->types[gpu->gpu] = types;
  events->told[gpu->gpu][0] = look_up(gpu->gpu, WHOLE, "xid", NULL);
  events->told[gpu->gpu][1] = look_up(gpu->gpu, WHOLE, "ecc_event", NULL);
  return failure(gpu->gpu, WHOLE, "nvmlDeviceRegisterEvents");
}

int nvmlEventSetWait_v2(events_t *events, event_t *out, unsigned timeout_ms) {
  static const unsigned long long types[2] = {XID_EVENT, ECC_EVENT};
  static const char *keys[2] = {"xid", "ecc_event"};
  char value[136];
  for (double until_s = now_s() + timeout_ms / 1e3;;) {
    int code = failure(DRIVER, WHOLE, "nvmlEventSetWait");
    if (code) return code;
    for (int i = 0; i < GPUS; i++)
      for (int kind = 0; kind < 2; kind++)
        if (events->types[i] & types[kind] &&
            look_up_to(events->told[i][kind] + 1, i, WHOLE, keys[kind], value) > events->told[i][kind]) {
          events->told[i][kind]++;
          *out = (event_t){&gpus[i][SLICES], types[kind], strtoull(value, NULL, 0), ~0u, ~0u};
          return SUCCESS;
        }
    if (now_s() >= until_s) return TIMEOUT;
    usleep(2000);
  }
}

// --- GPM

int nvmlGpmQueryDeviceSupport(gpu_t *gpu, unsigned *version_and_answer) {
  if (version_and_answer[0] != 1) return VERSION_MISMATCH;
  version_and_answer[1] = look_up(gpu->gpu, gpu->slice, "gpm", NULL) > 0;
  return failure(gpu->gpu, gpu->slice, "nvmlGpmQueryDeviceSupport");
}

int nvmlGpmSampleAlloc(sample_t **sample) {
  *sample = calloc(1, sizeof **sample);
  return SUCCESS;
}

int nvmlGpmSampleFree(sample_t *sample) {
  free(sample);
  return SUCCESS;
}

int nvmlGpmSampleGet(gpu_t *gpu, sample_t *sample) {
  int code = failure(gpu->gpu, gpu->slice, "nvmlGpmSampleGet");
  if (!code && !look_up(gpu->gpu, gpu->slice, "gpm", NULL)) code = NOT_SUPPORTED;
  if (!code) *sample = (sample_t){gpu, now_s()};
  return code;
}

int nvmlGpmMigSampleGet(gpu_t *gpu, unsigned instance, sample_t *sample) {
  unsigned id = 0;
  for (int slice = 0; slice < SLICES; slice++)
    if (!nvmlDeviceGetGpuInstanceId(&gpus[gpu->gpu][slice], &id) && id == instance) {
      *sample = (sample_t){&gpus[gpu->gpu][slice], now_s()};
      return SUCCESS;
    }
  return INVALID_ARGUMENT;
}

int nvmlGpmMetricsGet(question_t *question) {
  char key[32], value[136];
  if (question->version != 1) return VERSION_MISMATCH;
  if (!question->older->gpu || question->newer->at_s <= question->older->at_s) return INVALID_ARGUMENT;
  for (unsigned i = 0; i < question->count; i++) {
    metric_t *metric = &question->metrics[i];
    snprintf(key, sizeof key, "gpm.%u", metric->number);
    metric->code = look_up(question->newer->gpu->gpu, question->newer->gpu->slice, key, value) ? SUCCESS : NOT_SUPPORTED;
    metric->value = metric->code ? 0 : atof(value);
  }
  return SUCCESS;
}
