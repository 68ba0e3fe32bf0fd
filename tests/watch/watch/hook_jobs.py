"""Training jobs as others write them, each a script that knows nothing of stoker, for the tests of the hook.

What each knows of itself (how long it waited, by its own clock) it writes into known.json in the current folder.
"""

WAIT_S, TRAINING_NAPS = 0.004, 4 + 64
"""Sleep of each sample, and the samples of LOOP that the training thread loads."""

DATA = """
import json, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)
WAIT_S = 0.004
known = {"wait": 0.0, "naps": 0.0}


def nap(seconds):
    begun = time.perf_counter()
    time.sleep(seconds)
    known["naps"] += time.perf_counter() - begun


class Slow(Dataset):
    def __init__(self, n, wait_s=WAIT_S):
        self.n, self.wait_s = n, wait_s

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.wait_s:  # a sleep of 0 s is as long as others use the core
            nap(self.wait_s)
        return torch.full((3, 16, 16), i / self.n), i % 10


def at_first_step(*_):
    known.setdefault("naps_before", known["naps"])


def timed(name, function):
    def wrapper(*args, **kwargs):
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            known[name] = known.get(name, 0.0) + time.perf_counter() - begun

    return wrapper


register_optimizer_step_post_hook(at_first_step)


def net():
    pool = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), *pool, torch.nn.Linear(8, 10))


def tell():
    with open("known.json", "w") as file:
        json.dump(known, file)
"""

LOOP = (
    DATA
    + """
model = net()
model[0].eval()  # a frozen part
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
measure = torch.nn.functional.cross_entropy


def detections(samples):
    return tuple(zip(*samples))


def waiting(loader):
    begun = time.perf_counter()
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        known["wait"] += time.perf_counter() - begun
        yield batch
        begun = time.perf_counter()


for x, y in DataLoader(Slow(4), 4):  # the first step ends the start
    measure(model(x), y).backward()
    optimizer.step()
known["wait"] = 0.0
for epoch in range(2):
    for number, (x, y) in enumerate(waiting(DataLoader(Slow(32), 4))):
        measure(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
known["train"], known["wait"] = known["wait"], 0.0
for x, y in waiting(DataLoader(Slow(32), 4)):  # evaluation, by batches without a gradient each
    with torch.no_grad():
        model(x)
known["eval"], known["wait"] = known["wait"], known["train"]
for images, labels in waiting(DataLoader(Slow(8), 4, num_workers=1, collate_fn=detections)):
    measure(model(torch.stack(images)), torch.tensor(labels)).backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
tell()
print("loss", sum(float(p.sum()) for p in model.parameters()))
"""
)

VALIDATIONS = (
    DATA
    + """
from torch.utils.data import TensorDataset

model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
measure = torch.nn.functional.cross_entropy
images, labels = torch.zeros(64, 3, 16, 16), torch.zeros(64, dtype=torch.long)
held_back = TensorDataset(images, labels)


def forward_for(seconds):
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        measure(model(images), labels)


def by_hand():
    model.eval()
    for _ in range(40):
        with torch.no_grad():
            forward_for(0.01)
    model.train()


def with_gradients():
    model.eval()
    forward_for(0.4)
    for x, y in DataLoader(held_back, 8):
        measure(model(x), y)


for epoch in range(2):  # each validation in the middle of an epoch, whose loader stays open
    model.train()
    for number, (x, y) in enumerate(DataLoader(Slow(96), 8), 1):
        model[0].eval()  # a frozen part
        measure(model(x), y).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 0:
            timed("eval", (by_hand, with_gradients, by_hand)[number // 4 - 1])()
        elif number % 2 == 0:
            timed("between", time.sleep)(0.1)
time.sleep(0.5)
tell()
"""
)

RESTARTS = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keeps = DataLoader(TensorDataset(torch.zeros(16, 4)), 8, num_workers=1, persistent_workers=True)
    for epoch in range(6):  # the first three start workers again, the others keep them
        for (x,) in DataLoader(TensorDataset(torch.zeros(16, 4)), 8, num_workers=1) if epoch < 3 else keeps:
            model(x).sum().backward()
            optimizer.step()
"""

LIGHTNING = (
    DATA
    + """
import pytorch_lightning as lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_start(self):
        self.begun = time.perf_counter()

    def on_validation_epoch_end(self):
        time.sleep(0.2)  # the metrics
        known["eval"] = known.get("eval", 0.0) + time.perf_counter() - self.begun

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet)
trainer.fit(Module(), DataLoader(Slow(64), 8), DataLoader(Slow(32, 0.0), 8))
tell()
print("steps", trainer.global_step)
"""
)

TRANSFORMERS = (
    DATA
    + """
import transformers


class Rows(Slow):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"x": x, "labels": torch.tensor(y)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None):
        raw = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(raw, labels), "logits": raw}


settings = transformers.TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=8, eval_strategy="epoch",
    save_strategy="epoch", gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
)
transformers.Trainer.evaluation_loop = timed("eval", transformers.Trainer.evaluation_loop)
done = transformers.Trainer(Model(), settings, train_dataset=Rows(64), eval_dataset=Rows(32, 0.0)).train()
tell()
print("steps", done.global_step)
"""
)

KERAS = """
import json, os, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import keras, numpy

WAIT_S, STEPS = 0.03, 80
known = {"naps": 0.0}


def nap(seconds):
    begun = time.perf_counter()
    time.sleep(seconds)
    known["naps"] += time.perf_counter() - begun


class Slow(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        nap(WAIT_S)
        return numpy.zeros((8, 16, 16, 3), "float32"), numpy.zeros(8)


def slow():
    for i in range(8 * STEPS):
        nap(WAIT_S / 8)
        yield numpy.zeros((16, 16, 3), "float32"), i % 10


data = Slow()
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    kinds = (tf.TensorSpec((16, 16, 3)), tf.TensorSpec((), tf.int32))
    data = tf.data.Dataset.from_generator(slow, output_signature=kinds).batch(8)
layers = [keras.layers.Input((16, 16, 3)), keras.layers.Conv2D(8, 3), keras.layers.GlobalAveragePooling2D()]
model = keras.Sequential([*layers, keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
held_back = numpy.zeros((16, 16, 16, 3)), numpy.zeros(16)
model.fit(data, epochs=1, verbose=0, validation_data=held_back)
model.save("model.keras")
with open("known.json", "w") as file:
    json.dump(known, file)
"""

TENSORFLOW = """
import json, os, sys, time
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import numpy
import tensorflow as tf

how = sys.argv[1]
known = {"wait": 0.0, "compile": 0.0, "eval": 0.0, "steps": 0, "traces": 0}
IMAGE_SIZE = 64


def load(i):
    if how == "storage":
        time.sleep(0.02)  # a read from a slow storage
    begun = time.thread_time()
    while how == "decode" and time.thread_time() - begun < 0.02:
        pass
    return numpy.full((IMAGE_SIZE, IMAGE_SIZE, 3), i % 7, numpy.float32), numpy.int32(i % 10)


def images(n):
    for i in range(n):
        yield load(i)


def make_dataset(n, batch_size=4):
    kinds = (tf.TensorSpec((IMAGE_SIZE, IMAGE_SIZE, 3)), tf.TensorSpec((), tf.int32))
    return tf.data.Dataset.from_generator(images, args=[n], output_signature=kinds).batch(batch_size)


layers = [tf.keras.layers.Conv2D(8, 3, activation="relu") for _ in range(4)]
model = tf.keras.Sequential([*layers, tf.keras.layers.GlobalAveragePooling2D(), tf.keras.layers.Dense(10)])
measure = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(0.01)


@tf.function
def train_step(x, y, step):
    known["traces"] += 1
    with tf.GradientTape() as tape:
        loss = measure(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def test_step(x, y):
    return measure(y, model(x, training=False))


def timed_next(iterator, name):
    begun = time.perf_counter()
    batch = next(iterator, None)
    if known["steps"]:
        known[name] += time.perf_counter() - begun
    return batch


for epoch in range(2):
    iterator = iter(make_dataset(int(sys.argv[2])))
    while (batch := timed_next(iterator, "wait")) is not None:
        begun, traces = time.perf_counter(), known["traces"]
        # a number of Python is a constant of the graph
        loss = train_step(*batch, known["steps"] if how == "retraces" else tf.constant(known["steps"]))
        if known["traces"] > traces and known["steps"]:
            known["compile"] += time.perf_counter() - begun
        known["steps"] += 1
    begun = time.perf_counter()
    for x, y in make_dataset(16):
        test_step(x, y)
    known["eval"] += time.perf_counter() - begun
    tf.train.Checkpoint(model=model).save("checkpoints/ckpt")
with open("known.json", "w") as file:
    json.dump(known, file)
"""

RANKS = (
    DATA
    + """
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(Slow(320, 0.01 if rank == 1 else 0.0), 8):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
import atexit, os

atexit._run_exitfuncs()
os._exit(0)  # gloo's threads live as long as the model, and may abort Python as it ends (PyTorch issue 190489)
"""
)
