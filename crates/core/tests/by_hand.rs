//! Methods against a page of double-precision arithmetic: a linear softmax model, two or three clients, gradients written
//! out, three rounds.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

use fedproj_core::{Config, Experiment, Simulation};
use fedproj_data::{Dataset, Partition, Samples, Shape};
use fedproj_rng::{Purpose, Stream};

const FEATURES: usize = 3;
const CLASSES: usize = 3;
const SEED: u64 = 11;
const LR: f64 = 0.5;

/// Weights are of order 1 and a case makes at most some twenty single-precision steps of 6e-8 each.
const TOLERANCE: f64 = 3e-6;

/// Clients of these sizes, whose classes overlap: the best model is finite, and another one on every client.
struct Problem {
    x: Vec<f32>,
    labels: Vec<u32>,
    sizes: Vec<usize>,
}

impl Problem {
    fn new(sizes: &[usize]) -> Self {
        let mut stream = Stream::new(SEED, Purpose::Synthetic, [0, 0, 0]);
        let (mut x, mut labels) = (Vec::new(), Vec::new());
        for (client, &size) in sizes.iter().enumerate() {
            for i in 0..size {
                // A client's main class, and now and then another one.
                let label = if i % 3 == 0 { stream.below(CLASSES as u32) } else { (client % CLASSES) as u32 };
                let center = |feature: usize| if feature as u32 == label { 0.7 } else { 0.0 };
                x.extend((0..FEATURES).map(|f| (center(f) + stream.normal()) as f32));
                labels.push(label);
            }
        }
        Self { x, labels, sizes: sizes.to_vec() }
    }

    /// The samples of a client.
    fn samples(&self, client: usize) -> Vec<usize> {
        let start: usize = self.sizes[..client].iter().sum();
        (start..start + self.sizes[client]).collect()
    }

    /// ∇ mean cross-entropy of a linear softmax model: rows of the weight matrix, then biases, as the network lays them out.
    fn gradient(&self, theta: &[f64], samples: &[usize]) -> Vec<f64> {
        self.gradient_of(theta, samples, |s, z| minus(&softmax(z), &one_hot(self.labels[s])))
    }

    /// The same for any loss of a sample, given its slopes along the logits.
    fn gradient_of(&self, theta: &[f64], samples: &[usize], slopes: impl Fn(usize, &[f64]) -> Vec<f64>) -> Vec<f64> {
        let mut grad = vec![0.0; theta.len()];
        for &s in samples {
            for (c, slope) in slopes(s, &self.logits(theta, s)).into_iter().enumerate() {
                for (f, x) in self.sample(s).into_iter().enumerate() {
                    grad[c * FEATURES + f] += slope * x / samples.len() as f64;
                }
                grad[CLASSES * FEATURES + c] += slope / samples.len() as f64;
            }
        }
        grad
    }

    fn sample(&self, s: usize) -> Vec<f64> {
        doubles(&self.x[s * FEATURES..(s + 1) * FEATURES])
    }

    fn logits(&self, theta: &[f64], s: usize) -> Vec<f64> {
        let (x, bias) = (self.sample(s), &theta[CLASSES * FEATURES..]);
        let row = |c: usize| &theta[c * FEATURES..(c + 1) * FEATURES];
        (0..CLASSES).map(|c| bias[c] + row(c).iter().zip(&x).map(|(w, x)| w * x).sum::<f64>()).collect()
    }

    /// The gradient on all samples of a client.
    fn full_gradient(&self, theta: &[f64], client: usize) -> Vec<f64> {
        self.gradient(theta, &self.samples(client))
    }

    /// The mini-batches of a client's epoch, in the order of the run.
    fn batches(&self, round: u32, client: usize, epoch: u32, batch: usize) -> Vec<Vec<usize>> {
        let samples = self.samples(client);
        let order = Stream::new(SEED, Purpose::BatchOrder, [round, client as u32, epoch]).permutation(samples.len());
        order.chunks(batch).map(|chunk| chunk.iter().map(|&i| samples[i as usize]).collect()).collect()
    }

    /// n_k / n
    fn shares(&self) -> Vec<f64> {
        let total: usize = self.sizes.iter().sum();
        self.sizes.iter().map(|&n| n as f64 / total as f64).collect()
    }

    fn simulation(&self, method: &str, overrides: &[&str]) -> Simulation {
        self.simulation_beside(method, overrides, 0)
    }

    /// With the first `n_public` samples as the public set.
    fn simulation_beside(&self, method: &str, overrides: &[&str], n_public: usize) -> Simulation {
        let base = [
            &format!("method.name={method}"),
            &format!("seed={SEED}"),
            "model.hidden=[]",
            "federation.fraction=1.0",
            "local.schedule.every=0.0",
            &format!("local.optimizer={{kind='sgd', lr={LR}, weight_decay=0.0}}"),
        ];
        let all: Vec<String> = base.iter().chain(overrides).map(|s| (*s).to_owned()).collect();
        let config = Config::from_layers(None, &all).unwrap();
        let method = config.method.build().unwrap();
        let names = (0..CLASSES).map(|c| c.to_string()).collect();
        let shape = Shape::Vector { features: FEATURES };
        let samples = Samples::F32(self.x.clone());
        let data = Dataset::new("by hand", shape, samples, Some(self.labels.clone()), names).unwrap();
        let lists = (0..self.sizes.len()).map(|k| self.samples(k).iter().map(|&s| s as u32).collect()).collect();
        let partition = Partition::from_lists("by hand", lists, self.labels.len()).unwrap();
        let first: Vec<u32> = (0..n_public as u32).collect();
        let public = (n_public > 0).then(|| data.subset(&first).without_labels());
        let experiment =
            Experiment::with_partition(config, method.as_ref(), data.clone(), data, public, partition).unwrap();
        Simulation::new(experiment, method, 2).unwrap()
    }

    /// Runs some rounds and compares the weights that go out after each with the reference's.
    fn check(&self, method: &str, overrides: &[&str], mut reference: impl FnMut(u32, Vec<f64>) -> Vec<f64>) {
        let mut simulation = self.simulation(method, overrides);
        let mut expected = doubles(&simulation.state().weights);
        for round in 0..3 {
            simulation.round(&|_| ()).unwrap();
            expected = reference(round, expected);
            let found = doubles(&simulation.state().weights);
            // NaN is not close.
            let close = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= TOLERANCE);
            assert!(close && found.len() == expected.len(), "{method}, round {round}:\n{found:?}\n{expected:?}");
        }
    }
}

fn softmax(z: &[f64]) -> Vec<f64> {
    let total: f64 = z.iter().map(|z| z.exp()).sum();
    z.iter().map(|z| z.exp() / total).collect()
}

fn one_hot(label: u32) -> Vec<f64> {
    (0..CLASSES as u32).map(|c| f64::from(u8::from(c == label))).collect()
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// a + s·b
fn plus(a: &[f64], s: f64, b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + s * b).collect()
}

fn minus(a: &[f64], b: &[f64]) -> Vec<f64> {
    plus(a, -1.0, b)
}

/// Σ_k w_k v_k
fn mix(weights: &[f64], vectors: &[Vec<f64>]) -> Vec<f64> {
    let zero = vec![0.0; vectors[0].len()];
    weights.iter().zip(vectors).fold(zero, |sum, (w, v)| plus(&sum, *w, v))
}

const FULL_BATCH: &str = "local.batch=100";

#[test]
fn scaffold_with_one_full_batch_step_is_gradient_descent_on_the_mean_objective() {
    let problem = Problem::new(&[8, 14]);
    problem.check("scaffold", &[FULL_BATCH, "local.epochs=1"], |_, theta| {
        let gradients = [problem.full_gradient(&theta, 0), problem.full_gradient(&theta, 1)];
        plus(&theta, -LR, &mix(&[0.5, 0.5], &gradients))
    });
}

#[test]
fn scaffold_with_three_steps_follows_its_algorithm() {
    let problem = Problem::new(&[8, 14]);
    let mut c = vec![0.0; CLASSES * (FEATURES + 1)];
    let mut own = [c.clone(), c.clone()];
    problem.check("scaffold", &[FULL_BATCH, "local.epochs=3", "method.scaffold.server_lr=0.8"], |_, theta| {
        let mut models = Vec::new();
        let mut change = vec![0.0; c.len()];
        for (k, own) in own.iter_mut().enumerate() {
            let mut w = theta.clone();
            for _ in 0..3 {
                let corrected = plus(&minus(&problem.full_gradient(&w, k), own), 1.0, &c);
                w = plus(&w, -LR, &corrected);
            }
            let next = plus(&minus(own, &c), 1.0 / (3.0 * LR), &minus(&theta, &w));
            change = plus(&change, 0.5, &minus(&next, own));
            *own = next;
            models.push(w);
        }
        c = plus(&c, 1.0, &change);
        plus(&theta, 0.8, &minus(&mix(&[0.5, 0.5], &models), &theta))
    });
}

#[test]
fn fedprox_follows_its_algorithm() {
    let problem = Problem::new(&[8, 14]);
    let settings = [FULL_BATCH, "local.epochs=3", "method.fedprox.proximal_weight=0.5"];
    problem.check("fedprox", &settings, |_, theta| {
        let local = |k: usize| {
            (0..3).fold(theta.clone(), |w, _| {
                let pulled = plus(&problem.full_gradient(&w, k), 0.5, &minus(&w, &theta));
                plus(&w, -LR, &pulled)
            })
        };
        mix(&problem.shares(), &[local(0), local(1)])
    });
}

#[test]
fn fednova_normalises_unequal_steps() {
    // Batches of 4: two steps an epoch for one client, five for the other.
    let problem = Problem::new(&[8, 18]);
    let momenta = [(0.0, "local.optimizer.momentum=0.0"), (0.9, "local.optimizer.momentum=0.9")];
    // Sums in integers have an update of their own.
    for ((momentum, settings), sum) in
        momenta.into_iter().flat_map(|m| ["federation.sum=float", "federation.sum=fixed"].map(|sum| (m, sum)))
    {
        problem.check("fednova", &["local.batch=4", "local.epochs=2", settings, sum], |round, theta| {
            let mut directions = Vec::new();
            let mut normalisers = Vec::new();
            for k in 0..2 {
                let (mut w, mut m) = (theta.clone(), vec![0.0; theta.len()]);
                let (mut c, mut a) = (0.0, 0.0);
                for batch in (0..2).flat_map(|epoch| problem.batches(round, k, epoch, 4)) {
                    m = plus(&problem.gradient(&w, &batch), momentum, &m);
                    w = plus(&w, -LR, &m);
                    c = momentum * c + 1.0;
                    a += c;
                }
                directions.push(minus(&theta, &w).iter().map(|d| d / a).collect());
                normalisers.push(a);
            }
            let p = problem.shares();
            let tau_eff: f64 = p.iter().zip(&normalisers).map(|(p, a)| p * a).sum();
            plus(&theta, -tau_eff, &mix(&p, &directions))
        });
    }
}

#[test]
fn fednova_with_equal_steps_is_fedavg_for_any_client_sizes() {
    // In single precision n_k / n of these sizes do not sum to 1: a shortcut over their sum would show.
    let problem = Problem::new(&[53, 164, 89]);
    let run = |method: &str| {
        let mut simulation = problem.simulation(method, &["local.batch=200", "local.epochs=2"]);
        (0..3).map(|_| simulation.round(&|_| ()).unwrap().model_hash).collect::<Vec<_>>()
    };
    assert_eq!(run("fednova"), run("fedavg"));
}

#[test]
fn feddyn_adds_the_mean_of_all_corrections() {
    let problem = Problem::new(&[8, 14, 9]);
    let alpha = 0.3;
    let mut h = [(); 3].map(|()| vec![0.0; CLASSES * (FEATURES + 1)]);
    problem.check("feddyn", &[FULL_BATCH, "local.epochs=2", "method.feddyn.alpha=0.3"], |_, theta| {
        let mut models = Vec::new();
        for (k, h) in h.iter_mut().enumerate() {
            let local = (0..2).fold(theta.clone(), |w, _| {
                let pulled = plus(&problem.full_gradient(&w, k), alpha, &plus(&minus(&w, &theta), 1.0, h));
                plus(&w, -LR, &pulled)
            });
            *h = plus(h, 1.0, &minus(&local, &theta));
            models.push(local);
        }
        let third = [1.0 / 3.0; 3];
        plus(&mix(&third, &models), 1.0, &mix(&third, &h))
    });
}

#[test]
fn a_correction_of_absent_clients_moves_them_with_the_mean() {
    let problem = Problem::new(&[8, 14, 9]);
    let settings = [
        FULL_BATCH,
        "local.epochs=2",
        "federation.fraction=0.67",
        "method.feddyn.alpha=0.3",
        "method.feddyn.absent=true",
    ];
    let experiment = problem.simulation("feddyn", &settings);
    let zero = vec![0.0; CLASSES * (FEATURES + 1)];
    // h holds what its client adds up; all clients share the drift, which the client adds to it.
    let (mut h, mut drift) = ([(); 3].map(|()| zero.clone()), zero.clone());
    problem.check("feddyn", &settings, |round, theta| {
        let cohort = experiment.experiment().cohort(round);
        assert_eq!(cohort.len(), 2);
        let mut models = Vec::new();
        for k in cohort.into_iter().map(|k| k as usize) {
            let own = plus(&h[k], 1.0, &drift);
            let local = (0..2).fold(theta.clone(), |w, _| {
                let pulled = plus(&problem.full_gradient(&w, k), 0.3, &plus(&minus(&w, &theta), 1.0, &own));
                plus(&w, -LR, &pulled)
            });
            h[k] = plus(&h[k], 1.0, &minus(&local, &theta));
            models.push(local);
        }
        let mean = mix(&[0.5; 2], &models);
        drift = plus(&drift, 1.0 / 3.0, &minus(&mean, &theta));
        // The mean of h + drift over all clients.
        plus(&plus(&mean, 1.0, &mix(&[1.0 / 3.0; 3], &h)), 1.0, &drift)
    });
}

#[test]
fn feddc_has_feddyns_drift_and_scaffolds_control_variates() {
    let problem = Problem::new(&[8, 14]);
    let zero = vec![0.0; CLASSES * (FEATURES + 1)];
    let (mut h, mut c_k, mut c) = ([zero.clone(), zero.clone()], [zero.clone(), zero.clone()], zero);
    let settings = [FULL_BATCH, "local.epochs=3", "method.feddc.alpha=0.3"];
    problem.check("feddc", &settings, |_, theta| {
        let mut models = Vec::new();
        let before = c.clone();
        for k in 0..2 {
            let local = (0..3).fold(theta.clone(), |w, _| {
                let steered = plus(&minus(&problem.full_gradient(&w, k), &c_k[k]), 1.0, &before);
                plus(&w, -LR, &plus(&steered, 0.3, &plus(&minus(&w, &theta), 1.0, &h[k])))
            });
            let change = minus(&plus(&vec![0.0; theta.len()], 1.0 / (3.0 * LR), &minus(&theta, &local)), &before);
            c_k[k] = plus(&c_k[k], 1.0, &change);
            c = plus(&c, 0.5, &change);
            h[k] = plus(&h[k], 1.0, &minus(&local, &theta));
            models.push(local);
        }
        plus(&mix(&[0.5; 2], &models), 1.0, &mix(&[0.5; 2], &h))
    });
}

/// ∇F_k at w + ρ g/‖g‖, g = ∇F_k(w), on all samples of a client.
fn gradient_uphill(problem: &Problem, w: &[f64], radius: f64, client: usize) -> Vec<f64> {
    let g = problem.full_gradient(w, client);
    let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
    problem.full_gradient(&plus(w, radius / norm, &g), client)
}

#[test]
fn fedsam_descends_the_gradient_uphill() {
    let problem = Problem::new(&[8, 14]);
    problem.check("fedsam", &[FULL_BATCH, "local.epochs=3", "method.fedsam.radius=0.4"], |_, theta| {
        let step = |w: Vec<f64>, k| plus(&w, -LR, &gradient_uphill(&problem, &w, 0.4, k));
        let local = |k: usize| (0..3).fold(theta.clone(), |w, _| step(w, k));
        mix(&problem.shares(), &[local(0), local(1)])
    });
}

#[test]
fn fedspeed_adds_feddyns_correction_to_the_gradient_uphill() {
    let problem = Problem::new(&[8, 14]);
    let (alpha, mut h) = (0.3, [(); 2].map(|()| vec![0.0; CLASSES * (FEATURES + 1)]));
    let settings = [FULL_BATCH, "local.epochs=2", "method.fedspeed.alpha=0.3", "method.fedspeed.radius=0.4"];
    problem.check("fedspeed", &settings, |_, theta| {
        let mut models = Vec::new();
        for (k, h) in h.iter_mut().enumerate() {
            let local = (0..2).fold(theta.clone(), |w, _| {
                let uphill = gradient_uphill(&problem, &w, 0.4, k);
                plus(&w, -LR, &plus(&uphill, alpha, &plus(&minus(&w, &theta), 1.0, h)))
            });
            *h = plus(h, 1.0, &minus(&local, &theta));
            models.push(local);
        }
        plus(&mix(&[0.5; 2], &models), 1.0, &mix(&[0.5; 2], &h))
    });
}

#[test]
fn fedlc_gives_rare_classes_a_margin_and_leaves_absent_ones_out() {
    // Two samples have two classes at most.
    let problem = Problem::new(&[2, 14]);
    problem.check("fedlc", &[FULL_BATCH, "local.epochs=3", "method.fedlc.margin=1.5"], |_, theta| {
        let local = |k: usize| {
            let samples = problem.samples(k);
            let count = |c: u32| samples.iter().filter(|&&s| problem.labels[s] == c).count() as f64;
            // 0 samples: the margin is infinite.
            let margins: Vec<f64> = (0..CLASSES as u32).map(|c| 1.5 * count(c).powf(-0.25)).collect();
            (0..3).fold(theta.clone(), |w, _| {
                let slopes = |s: usize, z: &[f64]| minus(&softmax(&minus(z, &margins)), &one_hot(problem.labels[s]));
                plus(&w, -LR, &problem.gradient_of(&w, &samples, slopes))
            })
        };
        mix(&problem.shares(), &[local(0), local(1)])
    });
}

#[test]
fn fedntd_distils_the_received_model_without_the_true_class() {
    let problem = Problem::new(&[8, 14]);
    let (beta, tau) = (2.0, 1.5);
    let settings = [FULL_BATCH, "local.epochs=3", "method.fedntd.distill_weight=2.0", "method.fedntd.temperature=1.5"];
    problem.check("fedntd", &settings, |_, theta| {
        let slopes = |s: usize, z: &[f64]| {
            let true_class = one_hot(problem.labels[s]);
            let others = |z: &[f64]| {
                let z: Vec<f64> = z.iter().zip(&true_class).map(|(z, t)| z / tau - 1e9 * t).collect();
                softmax(&z)
            };
            let distilled = minus(&others(z), &others(&problem.logits(&theta, s)));
            plus(&minus(&softmax(z), &true_class), beta / tau, &distilled)
        };
        let local = |k: usize| {
            let step = |w: Vec<f64>, _| plus(&w, -LR, &problem.gradient_of(&w, &problem.samples(k), slopes));
            (0..3).fold(theta.clone(), step)
        };
        mix(&problem.shares(), &[local(0), local(1)])
    });
}

#[test]
fn fedacg_sends_a_model_ahead_along_its_momentum() {
    let problem = Problem::new(&[8, 14]);
    let mut m = vec![0.0; CLASSES * (FEATURES + 1)];
    let settings = [FULL_BATCH, "local.epochs=2", "method.fedacg.momentum=0.6", "method.fedacg.proximal_weight=0.1"];
    problem.check("fedacg", &settings, |_, ahead| {
        let local = |k: usize| {
            (0..2).fold(ahead.clone(), |w, _| {
                plus(&w, -LR, &plus(&problem.full_gradient(&w, k), 2.0 * 0.1, &minus(&w, &ahead)))
            })
        };
        let mean = mix(&[0.5; 2], &[local(0), local(1)]);
        m = plus(&minus(&mean, &ahead), 0.6, &m);
        plus(&mean, 0.6, &m)
    });
}

/// FedAvg's average after one full-batch step a client.
fn average(problem: &Problem, theta: &[f64]) -> Vec<f64> {
    let models: Vec<Vec<f64>> = (0..2).map(|k| plus(theta, -LR, &problem.full_gradient(theta, k))).collect();
    mix(&problem.shares(), &models)
}

#[test]
fn fedavgm_keeps_momentum_on_the_server() {
    let problem = Problem::new(&[8, 14]);
    let mut m = vec![0.0; CLASSES * (FEATURES + 1)];
    problem.check("fedavgm", &[FULL_BATCH, "local.epochs=1", "method.fedavgm.server_lr=0.7"], |_, theta| {
        m = plus(&minus(&average(&problem, &theta), &theta), 0.9, &m);
        plus(&theta, 0.7, &m)
    });
}

#[test]
fn fedadam_keeps_moments_on_the_server() {
    let problem = Problem::new(&[8, 14]);
    let (mut m, mut v) = (vec![0.0; CLASSES * (FEATURES + 1)], vec![1e-6; CLASSES * (FEATURES + 1)]);
    problem.check("fedadam", &[FULL_BATCH, "local.epochs=1"], |_, theta| {
        let delta = minus(&average(&problem, &theta), &theta);
        for ((m, v), d) in m.iter_mut().zip(&mut v).zip(&delta) {
            *m = 0.9 * *m + 0.1 * d;
            *v = 0.99 * *v + 0.01 * d * d;
        }
        let step: Vec<f64> = m.iter().zip(&v).map(|(m, v)| m / (v.sqrt() + 1e-3)).collect();
        plus(&theta, 0.01, &step)
    });
}

#[test]
fn fedmd_digests_the_consensus_and_revisits_its_own_samples() {
    const N_PUBLIC: usize = 5;
    let problem = Problem::new(&[9, 6]);
    let overrides = ["local.epochs=1", "local.batch=9", "method.fedmd.memory={size=5, batch=5}"];
    let mut simulation = problem.simulation_beside("fedmd", &overrides, N_PUBLIC);
    let public: Vec<usize> = (0..N_PUBLIC).collect();
    let step = |theta: &[f64], g: &[f64]| -> Vec<f64> { theta.iter().zip(g).map(|(w, g)| w - LR * g).collect() };
    let start = doubles(&simulation.state().weights);
    let (mut own, mut server, mut consensus) = ([start.clone(), start.clone()], start, None::<Vec<Vec<f64>>>);
    for round in 0..3 {
        simulation.round(&|_| ()).unwrap();
        // |z − s̄| has the slope ±1, divided by the number of classes; the gradient is the mean over the samples.
        let digest = |theta: &[f64], consensus: &[Vec<f64>]| {
            let slope = |(z, s): (&f64, &f64)| (z - s).signum() / CLASSES as f64;
            let g = problem.gradient_of(theta, &public, |x, z| z.iter().zip(&consensus[x]).map(slope).collect());
            step(theta, &g)
        };
        for (client, theta) in own.iter_mut().enumerate() {
            if let Some(consensus) = &consensus {
                *theta = digest(theta, consensus);
            }
            *theta = step(theta, &problem.full_gradient(theta, client));
        }
        let mean = |x: &usize| -> Vec<f64> {
            let logits = own.each_ref().map(|theta| problem.logits(theta, *x));
            (0..CLASSES).map(|c| logits.iter().map(|z| z[c] / 2.0).sum()).collect()
        };
        consensus = Some(public.iter().map(mean).collect());
        server = digest(&server, consensus.as_ref().unwrap());
        let clients = simulation.clients();
        let found = [&clients[&0]["stays"][..], &clients[&1]["stays"], simulation.state().published().weights];
        for (found, expected) in found.into_iter().zip([&own[0], &own[1], &server]) {
            let close = doubles(found).iter().zip(expected).all(|(a, b)| (a - b).abs() <= TOLERANCE);
            assert!(close, "round {round}:\n{found:?}\n{expected:?}");
        }
    }
}
