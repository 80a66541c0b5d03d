"""Methods written in Python: the built-in's bytes, no Python per step, and clear errors."""

import json
import math
import subprocess
import sys

import fedproj
import numpy as np
import pytest

SMALL = {
    "federation.rounds": 4,
    "local.epochs": 2,
    "model.hidden": [16],
    "data.private_samples": 300,
    "data.partition": {"kind": "dirichlet", "beta": 0.5, "clients": 4, "min_samples": 20},
}


class MyProx(fedproj.Method):
    mu: float = 0.01

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        step.add_scaled_diff(g, self.mu, step.weights, step.start)
        step.update(g)


class MyProj(fedproj.Method):
    temperature: float = 3.0
    warmup: float = 0.1

    needs_public = True

    def memory(self):
        return {"temperature": self.temperature}

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        if step.has_memory and step.round >= math.ceil(self.warmup * step.n_rounds):
            r = step.gradient(step.memory, fedproj.kl(self.temperature))
            step.project(g, r)
        step.update(g)

    def fuse(self, server):
        server.weights[:] = server.average()
        ensemble = server.ensemble()
        server.distill(ensemble)
        server.set_memory(ensemble)


class MyScaffold(fedproj.Method):
    server_lr: float = 1.0

    uploads = ("control_variate",)

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        c, c_k = step.broadcast("control_variate"), step.state("control_variate")
        step.add_scaled_diff(g, 1.0, c, c_k)
        step.update(g)

    def finish(self, client):
        change = client.upload("control_variate")
        c, c_k = client.broadcast("control_variate"), client.state("control_variate")
        client.add_scaled(change, -1.0, c)
        client.add_scaled_diff(change, np.float32(1.0) / np.float32(client.lr_total), client.start, client.weights)
        client.add_scaled(c_k, 1.0, change)

    def fuse(self, server):
        mean = server.average(server.uniform_weights())
        server.weights += np.float32(self.server_lr) * (mean - server.weights)
        per_client = np.full(server.n_results, np.float32(1.0) / np.float32(server.n_clients))
        server.send("control_variate")[:] += server.average(per_client, "control_variate")


class MyMoon(fedproj.Method):
    contrast_weight: float = 1.0
    temperature: float = 0.5

    projection_head = 256
    taps = ("head.2",)

    def local_step(self, step):
        objective = fedproj.cross_entropy
        previous = step.kept_model("previous")
        if previous is not None:
            positive, negative = step.embed(step.start, "head.2"), step.embed(previous, "head.2")
            contrast = fedproj.contrast(positive, negative, self.temperature).at("head.2")
            objective = objective + self.contrast_weight * contrast
        step.update(step.gradient(step.private, objective))

    def finish(self, client):
        client.keep_model("previous")


class MySam(fedproj.Method):
    radius: float = 0.05

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        step.update(step.gradient_uphill(g, self.radius, step.private, fedproj.cross_entropy))


class MyNtd(fedproj.Method):
    weight: float = 1.0
    temperature: float = 1.0

    def local_step(self, step):
        teacher = step.embed(step.start, "output")
        objective = fedproj.cross_entropy + self.weight * fedproj.not_true_kl(teacher, self.temperature)
        step.update(step.gradient(step.private, objective))


class MyLc(fedproj.Method):
    margin: float = 1.0

    def class_offsets(self, counts):
        margin = np.float32(self.margin)
        return [-margin * np.float32(n**-0.25) if n else -math.inf for n in counts.tolist()]

    def local_step(self, step):
        step.update(step.gradient(step.private, fedproj.offset_cross_entropy))


class MyLastGradient(fedproj.Method):
    """What FedProj's published code calls FedDyn."""

    def local_step(self, step):
        g, h = step.gradient(step.private, fedproj.cross_entropy), step.state("h")
        step.add_scaled(g, -1.0, h)
        step.clip(g, 5.0)
        step.assign(h, g)
        step.update(g)

    def fuse(self, server):
        mean, h_mean = server.average(), server.vector("h_mean")
        h_mean += (mean - server.weights) / np.float32(server.n_clients)
        server.weights[:] = mean + h_mean


class MyDitto(fedproj.Method):
    proximal_weight: float = 1.0
    lr: float = 0.01

    personal_model = "personal"

    def local_step(self, step):
        is_new = step.kept_model("personal") is None
        v = step.state("personal")
        if is_new:
            step.assign(v, step.start)
        own = step.gradient_at(v, step.private, fedproj.cross_entropy)
        step.add_scaled_diff(own, self.proximal_weight, v, step.start)
        step.add_scaled(v, -self.lr, own)
        step.update(step.gradient(step.private, fedproj.cross_entropy))


class MyGem(MyProj):
    """Rule `gem` without distillation."""

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        if step.has_memory and step.round >= math.ceil(self.warmup * step.n_rounds):
            references = [step.gradient(step.memory, fedproj.kl(self.temperature)) for _ in range(4)]
            step.project_to_cone(g, references)
        step.update(g)

    def fuse(self, server):
        server.weights[:] = server.average()
        server.set_memory(server.ensemble())


class MyEt(fedproj.Method):
    """FedET, for clients whose scores are never without variance."""

    diversity_weight: float = 0.05

    needs_public = True

    def fuse(self, server):
        server.weights[:] = server.average()
        scores = np.stack([outputs.logits for outputs in server.client_outputs()])
        a = scores.var(axis=2, keepdims=True)
        labels = (a * scores / a.sum(axis=0)).sum(axis=0).argmax(axis=1)
        differs = (scores.argmax(axis=2) != labels)[:, :, None]
        with np.errstate(invalid="ignore"):  # samples without a minority have no logits
            minority = (differs * a * scores).sum(axis=0) / (differs * a).sum(axis=0)
        server.distill_labels(labels, minority, weights=(1.0, self.diversity_weight), optimizer={"kind": "sgd", "lr": 0.1})


class MyGen(fedproj.Method):
    """FedGen."""

    decay: float = 0.98

    def generator(self):
        return {"noise": 32, "hidden": 256, "batch": 32}

    def local_step(self, step):
        # Single precision, as the engine's.
        weight = float(np.float32(10.0) * np.float32(self.decay) ** step.round)
        objective = fedproj.cross_entropy + weight * fedproj.kl(1.0)
        if not step.has_generator:
            return super().local_step(step)
        g = step.gradient(step.taught, objective)
        step.add_scaled(g, 1.0, step.gradient(step.generated, weight * fedproj.cross_entropy))
        step.update(g)

    def fuse(self, server):
        server.train_generator(decay=self.decay)
        server.weights[:] = server.average()


class MyBn(fedproj.Method):
    """FedBN."""

    stays_with_client = ("norm",)


class MyDf(fedproj.Method):
    """FedDF."""

    needs_public = True
    exchanges_logits = True

    def fuse(self, server):
        server.weights[:] = server.average()
        server.distill(server.ensemble(), temperature=1.0, t2=False, epochs=2, optimizer={"lr": 1e-3})


class MyGkt(fedproj.Method):
    """FedGKT whose server does not learn. The public set is the private one, so the server computes its answers from it."""

    distill_weight: float = 1.0
    temperature: float = 3.0

    needs_public = True
    sends_logits = True
    exit_level = 0
    stays_with_client = ("fc1", "exit")
    taps = ("exit",)

    def local_step(self, step):
        own = fedproj.cross_entropy.at("exit")
        if not step.has_logits:
            return step.update(step.gradient(step.private, own))
        kl = fedproj.kl(self.temperature, times_t_squared=True).at("exit")
        step.update(step.gradient(step.taught, own + self.distill_weight * kl))

    def fuse(self, server):
        received, mean, models = server.weights.copy(), server.average(), server.stack()
        for client, model in zip(server.clients, models):
            server.weights[:] = model
            rows = server.samples_of(client.client)
            server.send("logits")[rows] = server.global_outputs().logits[rows]
        server.weights[:] = mean


class MyAdam(fedproj.Method):
    """FedAdam's server, to see that vectors are kept between rounds."""

    def fuse(self, server):
        delta = server.average() - server.weights
        m, v = server.vector("m"), server.vector("v", initial=1e-6)
        m[:] = np.float32(0.9) * m + np.float32(0.1) * delta
        v[:] = np.float32(0.99) * v + np.float32(0.01) * delta * delta
        server.weights += np.float32(0.01) * m / (np.sqrt(v) + np.float32(1e-3))


def made(out, method, **settings):
    return fedproj.run(method=method, settings={**SMALL, **settings}, out=out, progress=False)


SGD = {"local.optimizer": {"kind": "sgd", "lr": 0.05}}


@pytest.mark.parametrize(
    ("copy", "name", "settings"),
    [
        (MyProx(mu=0.1), "fedprox", {"method.fedprox.proximal_weight": 0.1}),
        (MyProj(), "fedproj", {}),
        (MyScaffold(), "scaffold", SGD),
        (MyMoon(), "moon", {}),
        (MySam(radius=0.1), "fedsam", {"method.fedsam.radius": 0.1}),
        (MyNtd(), "fedntd", {}),
        (MyLc(margin=0.7), "fedlc", {"method.fedlc.margin": 0.7}),
        (MyLastGradient(), "feddyn", {"method.feddyn.authors": True, "method.feddyn.clip": 5.0}),
        (MyGem(), "fedproj", {"method.fedproj.projection.rule": "gem", "method.fedproj.distill.epochs": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_copy_of_a_built_in_method_gives_its_bytes(tmp_path, copy, name, settings):
    ours = made(tmp_path / "ours", name, **settings)
    theirs = made(tmp_path / "theirs", copy, **{k: v for k, v in settings.items() if not k.startswith("method")})
    plain = made(tmp_path / "plain", "fedavg", **{k: v for k, v in settings.items() if not k.startswith("method")})
    assert [r["model_hash"] for r in theirs.rounds] == [r["model_hash"] for r in ours.rounds]
    if name != "moon":
        assert (tmp_path / "theirs/model.safetensors").read_bytes() == (tmp_path / "ours/model.safetensors").read_bytes()
        assert plain.summary["model_hash"] != ours.summary["model_hash"], "the method does something"
    assert theirs.metrics["projection_rate"].tolist() == pytest.approx(ours.metrics["projection_rate"].tolist(), nan_ok=True)


def test_a_copy_of_ditto_keeps_the_same_models_of_its_own(tmp_path):
    measured = {"federation.evaluate_clients": True, "federation.rounds": 2}
    ours = made(tmp_path / "ours", "ditto", **measured, **{"method.ditto.lr": 0.05})
    theirs = made(tmp_path / "theirs", MyDitto(lr=0.05), **measured)
    plain = made(tmp_path / "plain", "fedavg", **measured)
    accuracies = [run.metrics["personal_accuracy"].tolist() for run in (ours, theirs, plain)]
    assert accuracies[0] == accuracies[1] != accuracies[2]


def test_students_learn_from_labels_as_fedets_does(tmp_path):
    # NumPy sums in another order, so the bytes differ. Adam would turn rounding errors into whole steps.
    one, sgd = {"federation.rounds": 1}, {"method.fedet.optimizer": {"kind": "sgd", "lr": 0.1}}
    ours, theirs = made(tmp_path / "ours", "fedet", **one, **sgd).model(), made(tmp_path / "theirs", MyEt(), **one).model()
    start = made(tmp_path / "plain", "fedavg", **one).model()
    for name, weights in ours.items():
        moved = np.linalg.norm(weights - start[name])
        assert moved > 0 and np.linalg.norm(theirs[name] - weights) < 1e-2 * moved, name


def test_descending_is_taking_gradients_and_steps(tmp_path):
    class Descends(fedproj.Method):
        def local_step(self, step):
            step.descend(2, step.private, fedproj.cross_entropy)

    class Steps(fedproj.Method):
        def local_step(self, step):
            for _ in range(2):
                step.update(step.gradient(step.private, fedproj.cross_entropy))

    descended, stepped = made(tmp_path / "a", Descends()), made(tmp_path / "b", Steps())
    assert descended.summary["model_hash"] == stepped.summary["model_hash"]
    assert descended.summary["model_hash"] != made(tmp_path / "c", "fedavg").summary["model_hash"]


def test_a_memory_batch_after_another_passes_over_the_memory_once(tmp_path):
    class Digests(fedproj.Method):
        needs_public = True

        def memory(self):
            return {"size": 100, "batch": 30}

        def local_step(self, step):
            counts.add(step.n_memory_batches)
            if step.step == 0 and step.has_memory:
                step.descend(step.n_memory_batches, step.memory, fedproj.absolute_error)
            step.update(step.gradient(step.private, fedproj.cross_entropy))

        def fuse(self, server):
            server.weights[:] = server.average()
            server.set_memory(server.ensemble())

    counts = set()
    made(tmp_path / "a", Digests())
    assert counts == {0, 3}, "none before the first ensemble, then 100 // 30"


def test_a_layer_keeps_its_outputs_along_an_input_that_the_server_sent(tmp_path):
    class Guarded(fedproj.Method):
        guards: bool = True

        def local_step(self, step):
            g = step.gradient(step.private, fedproj.cross_entropy)
            r = step.broadcast("r")
            if self.guards:
                step.project_inputs(g, [r])
            step.update(g)

        def fuse(self, server):
            # θ begins with fc1.weight (16, 64); a row of it has room for one direction of the layer's input.
            server.send("r")[:64] = direction
            moved.append(abs((server.average() - server.weights)[: 16 * 64].reshape(16, 64) @ direction).max())
            server.weights[:] = server.average()

    direction = np.full(64, 1 / 8, dtype=np.float32)
    for guards in (True, False):
        moved = []
        made(tmp_path / str(guards), Guarded(guards=guards), **SGD)
        assert moved[0] > 1e-3 and (max(moved[1:]) < 1e-6) == guards, moved


def test_a_model_aside_is_published_and_never_sent(tmp_path):
    class Aside(fedproj.Method):
        needs_public = True

        def fuse(self, server):
            assert server.config["model"]["hidden"] == [16]
            before = server.weights.copy()
            server.distill(server.ensemble(), absolute=True, aside=True, optimizer={"kind": "adam", "lr": 1e-3})
            assert (server.weights == before).all()
            students.append(server.vector("student").copy())

    students = []
    run = made(tmp_path / "a", Aside())
    assert len({student.tobytes() for student in students}) == 4
    published = np.concatenate([values.ravel() for values in run.model().values()])
    assert np.isin(students[-1], published).all() and published.size == students[-1].size


def test_public_labels_are_those_of_the_public_set(tmp_path):
    class Taught(fedproj.Method):
        needs_public = True
        needs_public_labels = True

        def fuse(self, server):
            labels = server.public_labels()
            assert labels.shape == (server.n_public,) and set(labels) <= set(range(server.n_classes))
            server.weights[:] = server.average()
            server.distill_labels(labels, epochs=5, optimizer={"kind": "adam", "lr": 1e-2})

    taught, plain = made(tmp_path / "a", Taught()), made(tmp_path / "b", "fedavg")
    assert taught.accuracy > plain.accuracy + 0.1


def test_python_is_asked_once_and_not_per_step(tmp_path):
    class Counted(MyProx):
        def local_step(self, step):
            asked.append(1)
            super().local_step(step)

    class ByRound(MyProx):
        def local_step(self, step):
            asked.append(step.round)
            super().local_step(step)

    asked = []
    made(tmp_path / "a", Counted())
    assert len(asked) <= 2, "at most once per thread that asked at the same time"
    asked.clear()
    made(tmp_path / "b", ByRound())
    assert set(asked) == {0, 1, 2, 3} and len(asked) <= 8


def test_random_numbers_of_a_step_are_compared_and_recorded_by_the_outcome(tmp_path):
    class Dropped(MyProx):
        def local_step(self, step):
            asked.append(1)
            g = step.gradient(step.private, fedproj.cross_entropy)
            if step.chance_of_step() >= 0.5:
                step.add_scaled_diff(g, 1.0, step.weights, step.start)
            step.update(g)

    asked = []
    dropped = made(tmp_path / "a", Dropped())
    assert len(asked) <= 4, "two outcomes"
    hashes = {made(tmp_path / m.__name__, m(mu=1.0)).summary["model_hash"] for m in [MyProx]}
    assert dropped.summary["model_hash"] not in hashes


def test_vectors_of_the_server_live_from_round_to_round_and_through_a_stop(tmp_path):
    whole = made(tmp_path / "whole", MyAdam())
    made(tmp_path / "part", MyAdam(), **{"federation.rounds": 2})
    settings = {**SMALL, "federation.rounds": 4}
    extended = fedproj.run(method=MyAdam(), settings=settings, out=tmp_path / "part", resume=True, progress=False)
    assert extended.summary["model_hash"] == whole.summary["model_hash"]


def test_a_median_over_clients(tmp_path):
    class Median(fedproj.Method):
        def fuse(self, server):
            stack = server.stack()
            seen.append((stack.shape, server.n_results, server.weights.size))
            mean = np.average(stack.astype(np.float64), axis=0, weights=[c.n_samples for c in server.clients])
            assert np.allclose(mean, server.average(), atol=1e-6)
            server.weights[:] = np.median(stack, axis=0)

    seen = []
    made(tmp_path / "a", Median())
    assert all(shape == (n, length) for shape, n, length in seen) and len(seen) == 4


def test_the_run_records_the_class_and_needs_it_again(tmp_path):
    run = made(tmp_path / "a", MyProx(mu=0.5))
    assert run.manifest["method_source"].startswith("class MyProx(fedproj.Method):")
    assert run.config["method"]["external"]["settings"] == {"mu": 0.5}
    assert run.manifest["hashes"]["method"] == run.config["method"]["external"]["hash"]
    assert run.verify(MyProx())["n_rounds"] == 4
    command = [sys.executable, "-m", "fedproj", "verify", str(tmp_path / "a")]
    elsewhere = subprocess.run(command, capture_output=True, text=True)
    assert elsewhere.returncode == 2
    assert "method `MyProx` is a class in Python, which is not at hand here\nhint: " in elsewhere.stderr


def test_settings_are_keyword_arguments():
    assert MyProx().mu == 0.01 and MyProx(mu=1.0) == MyProx(mu=1.0)
    with pytest.raises(TypeError, match="nu"):
        MyProx(nu=1.0)


@pytest.mark.parametrize(
    ("lines", "error", "text"),
    [
        ("if g: pass", TypeError, "a gradient has no value yet and Python cannot branch on it"),
        ("if g > 0: pass", TypeError, "cannot compare it"),
        ("g = g * 0.5", TypeError, "cannot compute with it"),
        ("np.linalg.norm(g)", TypeError, "has no value yet"),
        ("g.mean()", AttributeError, "`mean`: local_step is recorded once"),
        ("float(step.weights)", TypeError, "the client's weights has no value yet"),
        ("if step.chance_of_step(): pass", TypeError, "a random number of a step"),
        ("step.add_scaled(step.weights, 1.0, g)", TypeError, "weights move by step.update alone"),
        ("step.add_scaled(g, 1.0, g)", TypeError, "changed and read by the same operation"),
        ("step.add_scaled(g, float('nan'), step.start)", ValueError, "nan is no finite number"),
        ("step.add_scaled(g, 1.0, np.zeros(3))", TypeError, "expected a vector of the step"),
        ("step.gradient(step.memory, fedproj.cross_entropy)", ValueError, "has no memory in this round"),
        ("step.gradient('public', fedproj.cross_entropy)", ValueError, "one of step.private, step.memory, step.taught"),
        ("step.gradient(step.taught, fedproj.kl(1))", ValueError, "has sent no teacher; look at step.has_generator or"),
        ("step.gradient(step.generated, fedproj.cross_entropy)", ValueError, "no generator in this round; look at"),
        ("step.broadcast('generator')", fedproj.SettingsError, "`generator` is not as long as the weights"),
        ("step.broadcast('logits')", fedproj.SettingsError, "gradients on step.taught and step.generated use it"),
        ("step.gradient(step.private, 'mse')", TypeError, "an objective is a sum of losses"),
        ("step.gradient(step.private, fedproj.cross_entropy.at('nowhere'))", fedproj.SettingsError, "does not announce"),
        ("step.embed(step.start, 'features')", fedproj.SettingsError, "hint: taps"),
        ("step.project(g, step.start, scope='tensor')", ValueError, "'global' or 'layer'"),
        ("step.gradient_at(step.start, step.private, fedproj.cross_entropy)", fedproj.SettingsError, "the client keeps"),
        ("step.descend(-1, step.private, fedproj.cross_entropy)", ValueError, "a whole number from 0 to 100000, not -1"),
        ("step.descend(10**9, step.private, fedproj.cross_entropy)", ValueError, "to 100000, not 1000000000"),
        ("step.gradient(step.private, fedproj.kl(1))", ValueError, "step.private has no teacher's logits"),
        ("step.gradient(step.private, fedproj.masked_squares)", ValueError, "has no features of a teacher"),
        ("fedproj.kl(0)", ValueError, "temperature = 0.0: must be a positive number"),
        ("fedproj.kl(float('nan'))", ValueError, "temperature = nan: must be a positive number"),
        ("fedproj.cross_entropy * 1e300", ValueError, "weight = 1e+300: must be a finite number of single precision"),
        ("fedproj.not_true_kl(g, 1.0)", TypeError, "expected an embedding, such as step.embed"),
        ("fedproj.not_true_kl('logits', 1.0)", TypeError, "expected an embedding, such as step.embed"),
        ("step.clip(g, 0)", ValueError, "norm_max = 0: must be positive"),
        ("step.project(g, step.start, eps=-1.0)", ValueError, "eps = -1.0: must be 0 or positive"),
        ("abs(g) ** 2", TypeError, "cannot compute with it"),
        ("if step.chance_of_step() == 0.5: pass", TypeError, "cannot compare it"),
        ("step.add_scaled(step.state('x.buffers'), 1.0, g)", fedproj.SettingsError, "a name of the engine's own"),
        ("step.state('stays')", fedproj.SettingsError, "a name of the engine's own"),
        ("step.project_to_cone(g, [])", fedproj.SettingsError, "1 to 16 gradients of the step, not of 0"),
        ("step.project_to_cone(g, [step.start])", fedproj.SettingsError, "1 to 16 gradients of the step"),
        ("step.project_inputs(g, [step.start])", fedproj.SettingsError, "vectors that the server sends"),
        (
            "a, b = step.broadcast('a'), step.broadcast('b'); step.project_inputs(g, [b, a])",
            fedproj.SettingsError,
            "named one after another",
        ),
        (
            "a, b = (step.gradient(step.private, fedproj.cross_entropy), step.gradient(step.private, fedproj.cross_entropy)); "
            "step.project_to_cone(g, [b, a])",
            fedproj.SettingsError,
            "taken one after another",
        ),
        ("raise KeyError('mine')", KeyError, "mine"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_an_error_with_its_reason(tmp_path, lines, error, text):
    class Wrong(fedproj.Method):
        code: str = ""

        def local_step(self, step):
            g = step.gradient(step.private, fedproj.cross_entropy)
            exec(self.code)
            step.update(g)

    with pytest.raises(error) as raised:
        made(tmp_path / "a", Wrong(code=lines))
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "error", "text"),
    [
        ("server.weights[:] = np.zeros(3)", ValueError, "broadcast"),
        ("server.average([1.0])", fedproj.SettingsError, "the list of clients' weights has 1 values, but needs 2"),
        ("server.distill(fedproj.Outputs(np.zeros(3)))", fedproj.SettingsError, "the teacher's logits has 3 values"),
        ("server.distill_labels(np.full(server.n_public, 10))", ValueError, "whole numbers from 0 to 9"),
        ("server.distill_labels(np.zeros(3))", ValueError, "one per public sample"),
        ("server.distill(server.ensemble(), epochs=-1)", fedproj.SettingsError, "invalid value"),
        ("server.set_memory(fedproj.Outputs(np.zeros((2, 10))))", fedproj.SettingsError, "the memory's logits has 20"),
        ("server.train_generator()", fedproj.SettingsError, "hint: define generator() in the class"),
        ("server.send('generator')", fedproj.SettingsError, "hint: define generator() in the class"),
        ("server.send('logits')", fedproj.SettingsError, "hint: sends_logits = True in the class"),
        ("server.samples_of(10)", fedproj.SettingsError, "client = 10: must be one of the clients 0 to 3"),
        ("server.samples_of(-1)", fedproj.SettingsError, "invalid value"),
        ("server.distill(server.ensemble(), batch=0)", fedproj.SettingsError, "distill.batch = 0: must be at least 1"),
        ("server.ensemble('median')", fedproj.SettingsError, "unknown variant `median`"),
        ("server.average(part='nothing')", fedproj.SettingsError, "clients send no `nothing`; a part is weights, buffers"),
        ("server.stack('nothing')", fedproj.SettingsError, 'hint: uploads = ("nothing",)'),
        ("server.vector('student.buffers')", fedproj.SettingsError, "a name of the engine's own"),
        ("server.vector('x', initial=np.nan)", ValueError, "initial = nan: must be finite"),
        ("server.evaluate_instead(server.weights * np.nan)", fedproj.RunError, "a weight of the evaluated model is not"),
        ("server.distill(None)", TypeError, "targets are fedproj.Outputs, such as server.ensemble(), not None"),
        ("server.distill(server.ensemble(), feature_weight=1.0)", ValueError, "server.ensemble(features=True)"),
        ("server.distill_labels(np.zeros(server.n_public), np.zeros(3))", ValueError, "one row per public sample; got (3,)"),
        ("server.weights[:] = np.nan", fedproj.RunError, "is not finite after fusion"),
        ("raise KeyError('mine')", KeyError, "mine"),
    ],
)
def test_a_fusion_that_fails_is_an_error_with_its_reason(tmp_path, lines, error, text):
    class Wrong(fedproj.Method):
        code: str = ""

        needs_public = True

        def fuse(self, server):
            exec(self.code)

    with pytest.raises(error) as raised:
        made(tmp_path / "a", Wrong(code=lines))
    assert text in str(raised.value)


def test_outputs_need_a_public_set(tmp_path):
    class Wrong(fedproj.Method):
        code: str = ""

        def fuse(self, server):
            exec(self.code)

    public = "fedproj.Outputs(np.zeros((0, 10)))"
    for i, call in enumerate(["ensemble()", "client_outputs()", "global_outputs()", f"distill({public})"]):
        with pytest.raises(ValueError, match="set needs_public = True"):
            made(tmp_path / str(i), Wrong(code=f"server.{call}"))


def test_a_server_of_an_ended_round_answers_no_more(tmp_path):
    class Keeper(fedproj.Method):
        def fuse(self, server):
            kept.append(server)

    kept = []
    made(tmp_path / "a", Keeper())
    with pytest.raises(RuntimeError, match="a round that has ended"):
        kept[0].average()


def test_a_class_whose_source_cannot_be_read_is_refused(tmp_path):
    scope = {"fedproj": fedproj}
    exec("class Hidden(fedproj.Method):\n    pass\n", scope)
    with pytest.raises(ValueError, match="the source of `Hidden` cannot be read"):
        made(tmp_path / "a", scope["Hidden"]())


def test_a_method_may_refuse_a_configuration(tmp_path):
    class OnlySgd(fedproj.Method):
        def check(self, config):
            if config["local"]["optimizer"]["kind"] != "sgd":
                raise ValueError("OnlySgd needs plain SGD")

    with pytest.raises(ValueError, match="OnlySgd needs plain SGD"):
        made(tmp_path / "a", OnlySgd())
    assert made(tmp_path / "b", OnlySgd(), **SGD).is_finished


def test_recorded_operations_are_plain_data():
    answer = json.loads(MyProx(mu=0.25)._record_step("{}"))
    assert answer["facts"] == []
    assert [call["op"] for call in answer["calls"]] == ["gradient", "add_scaled_diff", "update"]
    assert answer["calls"][1] == {"op": "add_scaled_diff", "g": {"gradient": 0}, "a": 0.25, "x": "weights", "y": "start"}


@pytest.mark.parametrize("offsets", [[0.0], [[0.0] * 10], [np.inf] * 10, [np.nan] * 10, "ten"])
def test_class_offsets_are_one_number_per_class(tmp_path, offsets):
    class Wrong(MyLc):
        def class_offsets(self, counts):
            return offsets

    with pytest.raises(ValueError, match="could not convert" if offsets == "ten" else "class_offsets returns 10 numbers"):
        made(tmp_path / "wrong", Wrong())


def weights_of(out):
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [{"method.fedgen.decay": 0.5}, {"local.optimizer": {"kind": "sgd", "lr": 0.05}, "federation.fraction": 0.5}],
    ids=["decay", "few clients"],
)
def test_a_copy_of_fedgen_trains_the_same_generator(tmp_path, settings):
    decay = settings.get("method.fedgen.decay", 0.98)
    theirs_settings = {k: v for k, v in settings.items() if not k.startswith("method")}
    ours, theirs = made(tmp_path / "ours", "fedgen", **settings), made(tmp_path / "theirs", MyGen(decay=decay), **theirs_settings)
    plain = made(tmp_path / "plain", "fedavg", **theirs_settings)
    assert [r["model_hash"] for r in theirs.rounds] == [r["model_hash"] for r in ours.rounds]
    assert weights_of(tmp_path / "theirs") == weights_of(tmp_path / "ours")
    assert theirs.metrics["bytes_down"].tolist() == ours.metrics["bytes_down"].tolist()
    assert plain.summary["model_hash"] != ours.summary["model_hash"], "the method does something"


def test_a_generator_may_be_trained_in_numpy_and_lives_through_a_stop(tmp_path):
    class Own(MyGen):
        def fuse(self, server):
            generator = server.send("generator")
            before = generator.copy()
            server.train_generator(steps=2)
            assert (generator != before).any(), "the array is that of the trained generator"
            generator *= np.float32(0.5)
            server.weights[:] = server.average()

    whole = made(tmp_path / "whole", Own())
    made(tmp_path / "part", Own(), **{"federation.rounds": 2})
    extended = fedproj.run(method=Own(), settings=SMALL, out=tmp_path / "part", resume=True, progress=False)
    assert extended.summary["model_hash"] == whole.summary["model_hash"]
    assert whole.summary["model_hash"] != made(tmp_path / "plain", MyGen()).summary["model_hash"]


def blobs(n, seed):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 10
    return (rng.normal(size=(n, 12)) + np.eye(10, 12)[labels]).astype(np.float32), labels


def test_a_copy_of_fedgkts_clients_learns_from_the_same_logits(tmp_path):
    x, y = blobs(200, 0)
    partition = [list(range(at, 200, 4)) for at in range(4)]
    data = fedproj.Dataset(x, y, test=blobs(50, 1), partition=partition, public=x)
    settings = {**SGD, "federation.rounds": 4, "federation.fraction": 0.5, "local.epochs": 2, "model.hidden": [16]}

    def run(name, method, **more):
        more = {**settings, **more}
        return fedproj.run(data=data, method=method, settings=more, out=tmp_path / name, progress=False)

    ours = run("ours", "fedgkt", **{"method.fedgkt.epochs": 0})
    theirs = run("theirs", MyGkt())
    assert [r["model_hash"] for r in theirs.rounds] == [r["model_hash"] for r in ours.rounds]
    assert weights_of(tmp_path / "theirs") == weights_of(tmp_path / "ours")
    untaught = run("untaught", "fedgkt", **{"method.fedgkt.epochs": 0, "method.fedgkt.distill_weight": 0.0})
    assert untaught.summary["model_hash"] != ours.summary["model_hash"], "the logits do something"
    # Of the logits, a client receives the rows of its 50 samples.
    down = theirs.metrics["bytes_down"]
    assert (down[1:] - down[0]).tolist() == [4 * 2 * 50 * 10] * 3


def test_a_copy_of_fedbn_leaves_batch_norm_with_its_client(tmp_path):
    def net():
        graph = fedproj.Graph((8, 8))
        graph.flatten()
        graph.linear(16)
        graph.batch_norm(name="norm")
        graph.relu()
        graph.linear()
        return graph

    def run(method):
        settings = {k: v for k, v in SMALL.items() if k != "model.hidden"}
        return fedproj.run(model=net(), method=method, settings=settings, out=tmp_path / str(method), progress=False)

    ours, theirs, plain = run("fedbn"), run(MyBn()), run("fedavg")
    assert ours.summary["model_hash"] == theirs.summary["model_hash"] != plain.summary["model_hash"]


def test_a_copy_of_feddf_exchanges_logits_between_networks(tmp_path):
    groups = [{"name": "mlp", "share": 0.5, "hidden": [8]}, {"name": "mlp", "share": 0.5, "hidden": [16]}]
    # With a third of the clients, a network sometimes has none in a round.
    settings = {"model.clients": groups, "federation.fraction": 0.3, "federation.rounds": 5}
    distill = {"temperature": 1.0, "t2": False, "epochs": 2, "optimizer": {"lr": 1e-3}}
    ours = made(tmp_path / "ours", "feddf", **settings, **{"method.feddf.distill": distill})
    theirs = made(tmp_path / "theirs", MyDf(), **settings)
    assert [r["model_hash"] for r in theirs.rounds] == [r["model_hash"] for r in ours.rounds]


@pytest.mark.parametrize(
    ("announced", "error", "text"),
    [
        ({"generator": lambda self: {"noise": 0}}, fedproj.SettingsError, "generator.noise = 0: must be from 1 to"),
        ({"generator": lambda self: {"hide": 1}}, fedproj.SettingsError, "unknown field `hide`"),
        ({"generator": lambda self: {}, "sends_logits": True}, fedproj.SettingsError, "step.taught has one teacher"),
        ({"exit_level": 5}, fedproj.SettingsError, "exit_level = 5: must be one of this network's levels; it has 1"),
        ({"exit_level": -1}, fedproj.SettingsError, "integer `-1`, expected a whole number from 0 on"),
        ({"memory": lambda self: 3}, fedproj.SettingsError, "integer `3`, expected a dictionary"),
        ({"taps": ("nowhere",)}, fedproj.SettingsError, "the network has no node `nowhere`"),
        ({"taps": "features"}, TypeError, "taps is a tuple of names: ('features',), not 'features'"),
        ({"uploads": ("c",)}, ValueError, "`c` must be both in uploads and in client.upload('c'); only uploads names it"),
        ({"finish": lambda self, client: client.upload("c")}, ValueError, "only finish sends it"),
        ({"stays_with_client": ("fc",)}, fedproj.SettingsError, "a layer of this network with parameters: fc1, fc2"),
        ({"memory": lambda self: {"batch": 0}}, fedproj.SettingsError, "memory.batch = 0: must be at least 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_class_announces_is_checked_before_the_run(tmp_path, announced, error, text):
    class Announces(fedproj.Method):
        pass

    for name, value in announced.items():
        setattr(Announces, name, value)
    with pytest.raises(error) as raised:
        made(tmp_path / "a", Announces())
    assert text in str(raised.value)


def test_offsets_that_a_class_does_not_set_are_zero(tmp_path):
    class Offset(fedproj.Method):
        def local_step(self, step):
            step.update(step.gradient(step.private, fedproj.offset_cross_entropy))

    offset, plain = made(tmp_path / "a", Offset()), made(tmp_path / "b", "fedavg")
    assert offset.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-3)


def test_generated_features_have_labels_alone(tmp_path):
    class Wrong(MyGen):
        def local_step(self, step):
            if step.has_generator:
                step.gradient(step.generated, fedproj.kl(1.0))
            super().local_step(step)

    with pytest.raises(ValueError, match="take fedproj.cross_entropy at the output"):
        made(tmp_path / "a", Wrong())


def test_clients_that_keep_nothing_have_the_logits_that_the_server_sent_for_them(tmp_path):
    class Smooths(fedproj.Method):
        """Clients 0 and 1 learn from logits without preference, the others from labels alone."""

        sends_logits = True

        def local_step(self, step):
            asked.add((step.round > 0, step.client, step.has_logits))
            if step.has_logits:
                step.update(step.gradient(step.taught, fedproj.cross_entropy + fedproj.kl(1.0)))
            else:
                super().local_step(step)

        def fuse(self, server):
            server.weights[:] = server.average()
            logits = server.send("logits")
            assert logits.shape == (300, 10) and sum(len(server.samples_of(client)) for client in range(4)) == 300
            for client in (0, 1):
                logits[server.samples_of(client)] = 1.0

    asked, everybody = set(), {"federation.fraction": 1.0}
    run = made(tmp_path / "a", Smooths(), **everybody)
    assert asked == {(later, client, later and client < 2) for later in (False, True) for client in range(4)}
    assert run.summary["model_hash"] != made(tmp_path / "b", "fedavg", **everybody).summary["model_hash"]
