//! What goes wrong is said with its place (key, file, round, client), ends in the right exit code (2: what was asked, 1: what
//! happened on the way), and costs no completed round.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;

use command::{SMALL, failure, fedproj, rounds, run};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// `fedproj run` with these settings fails with this code, and its message holds all of these words.
fn check(folder: &Path, settings: &[&str], code: i32, words: &[&str]) {
    let (found, message) = failure(fedproj(folder, &[&["run", "--out", "a", "--quiet"], SMALL, settings].concat()));
    assert_eq!(found, code, "{settings:?}: {message}");
    for word in words {
        assert!(message.contains(word), "{settings:?}: no `{word}` in\n{message}");
    }
}

#[test]
fn unknown_names_are_answered_with_the_nearest() {
    let folder = tempfile::tempdir().unwrap();
    let check = |setting: &str, words: &[&str]| check(folder.path(), &[setting], 2, words);
    check("federation.round=3", &["unknown key `round`", "[federation]", "did you mean `federation.rounds`?"]);
    check("sede=3", &["unknown key `sede`", "did you mean `seed`?"]);
    check(
        "method.fedproj.memory.sise=3",
        &["`sise`", "[method.fedproj.memory]", "did you mean `method.fedproj.memory.size`?"],
    );
    check("method.name=fedavg,fedprox", &["hint: several methods are a sweep: sweep.method.name=fedavg,fedprox"]);
    check("method.name=fedporj", &["unknown method `fedporj`", "did you mean `fedproj`?"]);
    check("model.name=resnet-8", &["unknown model `resnet-8`", "did you mean `resnet8`?"]);
    check("data.private=digts", &["unknown data set `digts`", "digits"]);
    check("data.partition={kind='fair', clients=3}", &["fair", "dirichlet"]);
    check("preset=papre", &["papre", "paper"]);
    assert!(!folder.path().join("a/config.toml").exists(), "nothing was begun");
}

#[test]
fn values_that_cannot_be_are_named_with_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let check = |setting: &str, words: &[&str]| check(folder.path(), &[setting], 2, words);
    check("federation.rounds=0", &["federation.rounds = 0"]);
    check("federation.rounds=many", &["rounds", "many"]);
    check("federation.fraction=1.5", &["federation.fraction = 1.5"]);
    check("local.batch=0", &["local.batch"]);
    check("local.optimizer.lr=-1.0", &["local.optimizer", "learning rate = -1"]);
    check("local.optimizer.kind=sdg", &["sdg", "sgd"]);
    check("method.fedproj.memory.temperature=0.0", &["method.fedproj", "temperature"]);
    let adam = &["method.name=scaffold", "local.optimizer=adam"];
    self::check(folder.path(), adam, 2, &["scaffold needs plain SGD", "hint", "local.optimizer"]);
    check("data.private_samples=100000", &["data.private_samples = 100000", "digits"]);
    check("data.public=none", &["fedproj", "needs a public set", "data.public"]);
    check("seeds=[]", &["seeds"]);
    check("local.optimizer.momentum=2", &["local.optimizer.momentum = 2", "`adam` has no momentum", "hint"]);
    check("local.optimizer={kind='sgd', beta1=0.5}", &["local.optimizer.beta1 = 0.5", "`sgd` has no beta1"]);
    check("data.partition=file", &["data.partition: `path` is missing", "hint: write data.partition={kind = \"file\""]);
    check("data.private=./mine.csv", &["unknown data set", "write { name = \"csv\", path = \"./mine.csv\" }"]);
    check("server.listen=here", &["server.listen = \"here\": must be an address with a port"]);
    check("method.fedproj.averages.teacher=1.0", &["averages.teacher = 1: must be in [0, 1)", "0.9 reaches back"]);
    check("method.fedproj.averages.memory=-0.1", &["averages.memory = -0.1: must be in [0, 1)"]);
    check("federation.average_evaluated=1.0", &["federation.average_evaluated = 1: must be in [0, 1)"]);
}

#[test]
fn settings_that_do_not_go_together_are_answered_with_what_would_work() {
    let folder = tempfile::tempdir().unwrap();
    let once = "data.partition={kind='virtual', clients=50, samples=5}";
    let words = ["method.fedproj.correction.alpha = 0.01", "clients that come once", "hint: preset=leading-stateless"];
    check(folder.path(), &["preset=leading", once], 2, &words);
    let words = ["method.fedproj.lookahead = 0.85: must be 0 where method.fedproj.correction.alpha is above 0"];
    check(folder.path(), &["preset=leading", "method.fedproj.lookahead=0.85"], 2, &words);
    assert!(!folder.path().join("a").exists(), "nothing was begun");
    let words = ["data.augment = true", "the samples of `iris` are rows of a table", "hint: data.augment=false"];
    let three = "data.partition={kind='iid', clients=3}";
    check(folder.path(), &["data.private=iris", three, "data.augment=true"], 2, &words);
    run(folder.path(), "stateless", &["preset=leading-stateless", once]);
}

#[test]
fn a_word_that_is_no_file_is_answered_with_the_setting_that_it_may_mean() {
    let folder = tempfile::tempdir().unwrap();
    for (word, hint) in [
        ("FedAvg", "did you mean method=FedAvg?"),
        ("cifar10", "did you mean data.private=cifar10?"),
        ("a.toml", "`fedproj new a.toml` writes one"),
        ("quickly", "a setting has the form quickly=value"),
    ] {
        let (code, message) = failure(fedproj(folder.path(), &["run", word]));
        assert!(code == 2 && message.ends_with(&format!("hint: {hint}\n")), "{message}");
    }
    let (code, message) = failure(fedproj(folder.path(), &["run", "federation.rounds", "3"]));
    assert!(code == 2 && message.ends_with("hint: without spaces, federation.rounds=3\n"), "{message}");
    for (flag, setting) in [("--rounds", "federation.rounds"), ("--method=fedavg", "method"), ("--seed", "seed")] {
        let (code, message) = failure(fedproj(folder.path(), &["run", flag, "3"]));
        assert!(code == 2 && message.ends_with(&format!("hint: settings have no dashes: {setting}=…\n")), "{message}");
    }
    let (_, message) = failure(fedproj(folder.path(), &["compare", "--rounds", "3"]));
    assert!(!message.contains("settings"), "{message}");
    // A directory is there, so none of these was meant.
    let (_, message) = failure(fedproj(folder.path(), &["run", "."]));
    assert!(!message.contains("hint"), "{message}");
    run(folder.path(), "a", &["method=fedavg"]);
    let (code, message) = failure(fedproj(folder.path(), &["run", "a"]));
    assert!(code == 2 && message.contains("`a/config.toml` is the configuration of the run there"), "{message}");
    let (code, message) = failure(fedproj(folder.path(), &["run", "/dev/zero"]));
    assert!(code == 2 && message.contains("more than 4194304 bytes"), "{message}");
}

#[test]
fn what_is_no_run_cannot_be_verified() {
    let folder = tempfile::tempdir().unwrap();
    let verify = |run: &str| failure(fedproj(folder.path(), &["verify", run]));
    for (run, told) in [("nosuch", "`nosuch` is no directory"), (".", "`.` holds no run")] {
        let (code, message) = verify(run);
        assert!(code == 2 && message.contains(told), "{message}");
    }
    run(folder.path(), "all/a", &["method=fedavg"]);
    run(folder.path(), "all/b", &["method=fedavg"]);
    let (code, message) = verify("all");
    assert!(code == 2 && message.contains("`all` holds 2 runs") && message.contains("such as `all/a`"), "{message}");
}

#[test]
fn a_run_that_is_not_there_is_not_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let resume = |settings: &[&str]| {
        let command = [&["run", "--resume", "--json", "method=fedavg"], SMALL, settings].concat();
        command::output(fedproj(folder.path(), &command))
    };
    let told = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let nothing = resume(&[]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(told(&nothing).contains("hint: leave out --resume to begin it"), "{}", told(&nothing));
    assert!(!folder.path().join("runs").exists());
    // A run without --out is found again by its settings, and so is one of fewer rounds.
    let begun = command::json(folder.path(), &[&["run", "method=fedavg"], SMALL].concat());
    let extended = resume(&["federation.rounds=5"]);
    assert!(extended.status.success(), "{}", told(&extended));
    let extended: serde_json::Value = serde_json::from_slice(&extended.stdout).unwrap();
    assert_eq!(extended["run"], begun["run"]);
    assert_eq!(rounds(&folder.path().join(begun["run"].as_str().unwrap())).len(), 5);
    run(folder.path(), "runs/b", &["method=fedavg", "federation.rounds=4"]);
    let either = resume(&["federation.rounds=6"]);
    assert!(
        either.status.code() == Some(2) && told(&either).contains("name one of the shorter runs"),
        "{}",
        told(&either)
    );
}

#[test]
fn a_data_directory_that_is_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["data", "run", "partition", "doctor"] {
        let (code, message) = failure(fedproj(folder.path(), &[command, "--data-dir", "nosuch"]));
        assert!(code == 2 && message.contains("--data-dir nosuch: there is no such directory"), "{command}: {message}");
    }
}

#[test]
fn a_network_that_no_memory_holds_is_refused_with_the_figure() {
    let folder = tempfile::tempdir().unwrap();
    // 10¹² parameters, three times at least, in four bytes each.
    let words =
        ["1000076000010 parameters", "11176.7 GiB of memory, but this machine has", "hint: choose narrower layers"];
    check(folder.path(), &["model.hidden=[1000000,1000000]"], 2, &words);
    check(folder.path(), &["model.hidden=[99999999999]"], 2, &["model.hidden", "widths from 1 to 16777216"]);
    assert!(!folder.path().join("a").exists());
}

#[test]
fn data_get_names_the_site_and_refuses_what_is_not_published() {
    let folder = tempfile::tempdir().unwrap();
    let told = command::stdout(folder.path(), &["data", "get", "CIFAR10"]);
    for word in ["www.cs.toronto.edu", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "--from FILE"] {
        assert!(told.contains(word), "no `{word}` in\n{told}");
    }
    std::fs::write(folder.path().join("cifar-10-binary.tar.gz"), "cut short").unwrap();
    let get = |args: &[&str]| failure(fedproj(folder.path(), &[&["data", "get"], args].concat()));
    let (code, message) = get(&["cifar10", "--from", "cifar-10-binary.tar.gz"]);
    assert!(code == 1 && message.contains("c32a1d4ab5d03f1284b67883e8d87530") && message.contains("hint"), "{message}");
    let (code, message) = get(&["cifar100", "--from", "cifar-10-binary.tar.gz"]);
    assert!(code == 2 && message.contains("offers cifar-100-binary.tar.gz; or cifar-100-python.tar.gz"), "{message}");
    let (code, message) = get(&["digits"]);
    assert!(code == 2 && message.contains("part of the program"), "{message}");
    let (_, message) = get(&["mnist", "--from", "nosuch.npz"]);
    assert!(message.contains("nosuch.npz"), "{message}");
    assert!(std::fs::read_dir(folder.path().join("data")).unwrap().next().is_none());
}

#[test]
fn a_picture_has_the_ending_of_its_format() {
    let folder = tempfile::tempdir().unwrap();
    let (code, message) = failure(fedproj(folder.path(), &["partition", "--svg", "p.png"]));
    assert!(code == 2 && message.contains("must end in .svg"), "{message}");
    assert!(!folder.path().join("p.png").exists());
}

#[test]
fn measurements_in_the_label_column_are_asked_about() {
    let folder = tempfile::tempdir().unwrap();
    let rows = (0..60).map(|i| format!("{i}.0,1.0,{i}.5")).collect::<Vec<_>>().join("\n");
    std::fs::write(folder.path().join("prices.csv"), rows).unwrap();
    let csv = "data.private={name='csv', path='prices.csv'}";
    check(folder.path(), &[csv], 1, &["prices.csv", "line 1", "a class as label", "`0.5`", "hint: name the column"]);
}

#[test]
fn configuration_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("bad.toml"), "[federation]\nrounds = = 3\n").unwrap();
    check(folder.path(), &["bad.toml"], 2, &["bad.toml", "line 2"]);
    std::fs::write(folder.path().join("odd.toml"), "[federation]\nrunds = 3\n").unwrap();
    check(folder.path(), &["odd.toml"], 2, &["unknown key `runds`", "did you mean `federation.rounds`?"]);
    let (code, message) = failure(fedproj(folder.path(), &["run", "missing.toml"]));
    assert!(code > 0 && message.contains("missing.toml"), "{message}");
}

#[test]
fn data_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let clients = "data.partition={kind='dirichlet', beta=0.3, clients=1000, min_samples=15}";
    check(folder.path(), &[clients], 2, &["dirichlet partition is impossible", "1000 clients", "15000"]);
    check(folder.path(), &["data.public=iris"], 2, &["public set `iris`", "shape 4", "8×8×1"]);
    check(folder.path(), &["data.private=cifar10"], 1, &["cifar10", "data_batch_1.bin", "hint"]);
    let data = "data.private={name='numpy', path='x.npy'}";
    let header = format!("{:65}\n", "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2), }");
    let array = [b"\x93NUMPY\x01\0\x42\0".as_slice(), header.as_bytes(), &[0; 4]];
    std::fs::write(folder.path().join("x.npy"), array.concat()).unwrap();
    check(folder.path(), &[data], 2, &["has no labels", "hint: data.private.label names", "y or y_train"]);
    let csv = "data.private={name='csv', path='table.csv'}";
    for (text, code, words) in [
        ("a,b,label\n1.0,2.0,x\n1.0,two,y\n", 1, &["table.csv", "line 3", "two"][..]),
        ("a,b,label\n", 1, &["table.csv", "found a header alone"]),
        ("a,b,label\n1.0,2.0,x\n1.0,2.0,\n", 1, &["line 3: expected a class as label", "found ``"]),
        (&"1.0,2.0,x\n".repeat(40), 2, &["has one class, `x`", "hint", "data.private.label"]),
    ] {
        std::fs::write(folder.path().join("table.csv"), text).unwrap();
        check(folder.path(), &[csv], code, words);
    }
}

/// A CIFAR-10 directory of black aeroplanes; sparse files, so it costs no disk.
fn fake_cifar10(data: &Path) -> std::path::PathBuf {
    let folder = data.join("cifar-10-batches-bin");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"] {
        let file = std::fs::File::create(folder.join(format!("{name}.bin"))).unwrap();
        file.set_len(30_730_000).unwrap();
    }
    folder
}

#[test]
fn damaged_cifar_files_are_named_with_the_record() {
    use std::io::{Seek, SeekFrom, Write};
    let folder = tempfile::tempdir().unwrap();
    let cifar10 = fake_cifar10(folder.path());
    let settings = ["--data-dir", ".", "data.private=cifar10", "data.public=split"];
    let open = |name: &str| std::fs::OpenOptions::new().write(true).open(cifar10.join(name)).unwrap();
    let mut second = open("data_batch_2.bin");
    second.seek(SeekFrom::Start(3 * 3073)).unwrap();
    second.write_all(&[77]).unwrap();
    check(folder.path(), &settings, 1, &["data_batch_2.bin", "record 3", "label 77", "10 classes"]);
    open("data_batch_1.bin").set_len(30_729_999).unwrap();
    check(folder.path(), &settings, 1, &["data_batch_1.bin", "record 9999", "truncated"]);
}

#[test]
fn a_loss_that_leaves_the_numbers_names_its_step_and_keeps_completed_rounds() {
    let folder = tempfile::tempdir().unwrap();
    let huge = ["method.name=fedavg", "local.optimizer={kind='sgd', lr=1e30}"];
    check(folder.path(), &huge, 1, &["round 0, client", "step 1", "loss is NaN", "hint: lower local.optimizer.lr"]);
    // A decay that doubles the weights at every step overflows after some rounds.
    let growing =
        ["method.name=fedavg", "federation.rounds=40", "local.optimizer={kind='sgd', lr=0.1, weight_decay=30.0}"];
    let args = [&["run", "--out", "b", "--quiet"], SMALL, &growing].concat();
    let (code, message) = failure(fedproj(folder.path(), &args));
    let done = rounds(&folder.path().join("b")).len();
    assert!(code == 1 && done > 0, "{done} rounds: {message}");
    assert!(message.contains(&format!("round {done}")), "after {done} rounds: {message}");
    assert!(message.contains("the rounds before are on disk"), "{message}");
    assert!(folder.path().join(format!("b/checkpoints/round-{done:06}.ckpt")).exists());
}

#[test]
fn a_server_that_leaves_the_numbers_names_its_round() {
    let folder = tempfile::tempdir().unwrap();
    // Without momentum the first step is ten times the rate.
    let settings = ["method.name=fedadam", "method.fedadam.server_lr=3e38", "method.fedadam.beta1=0.0"];
    check(folder.path(), &settings, 1, &["round 0", "weight of the global model is not finite", "hint"]);
}

#[test]
fn exit_codes_part_what_was_asked_from_what_failed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    check(folder.path(), &["sede=3"], 2, &["unknown key"]);
    // A file stands where the run's directory should be.
    std::fs::write(path("a"), "not a directory").unwrap();
    check(folder.path(), &["method.name=fedavg"], 1, &["`a`", "cannot create", "hint: choose another directory"]);
    std::fs::remove_file(path("a")).unwrap();
    // A damaged checkpoint of an unfinished run.
    run(folder.path(), "a", &["method.name=fedavg", "federation.rounds=2"]);
    std::fs::remove_file(path("a/summary.json")).unwrap();
    for round in 1..3 {
        let checkpoint = path(&format!("a/checkpoints/round-00000{round}.ckpt"));
        std::fs::write(checkpoint, "FEDPROJC, but nothing that follows").unwrap();
    }
    let resume = ["--resume", "method.name=fedavg", "federation.rounds=2"];
    check(folder.path(), &resume, 1, &["round-000001.ckpt", "not a checkpoint", "hint: remove"]);
    // Another configuration in the same directory is the user's choice.
    check(folder.path(), &["--resume", "method.name=fedprox"], 2, &["another configuration"]);
}

/// `fedproj` where no file may grow beyond `n_blocks` of 512 or 1024 bytes, as the shell counts: a full disk for each file.
fn on_a_full_disk(folder: &Path, n_blocks: u32, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {n_blocks}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_fedproj")]).args(args);
    command.current_dir(folder).env_remove("FEDPROJ_DATA").stdin(Stdio::null());
    command
}

#[test]
fn a_full_disk_keeps_completed_rounds_and_the_run_goes_on_when_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    // Checkpoints of 3 KB fit, `metrics.jsonl` grows until it does not.
    let settings = ["method.name=fedavg", "model.hidden=[8]", "federation.rounds=60"];
    let reference = run(folder.path(), "reference", &settings);
    let args = [&["run", "--out", "full", "--quiet"], SMALL, &settings].concat();
    let (code, message) = failure(on_a_full_disk(folder.path(), 16, &args));
    assert!(code == 1 && message.contains("metrics.jsonl") && message.contains("cannot append"), "{message}");
    // The last line is torn; all before it are whole, and those of the undisturbed run.
    let text = std::fs::read_to_string(folder.path().join("full/metrics.jsonl")).unwrap();
    let expected = rounds(&folder.path().join("reference"));
    let whole: Vec<&str> = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
    assert!(whole.len() >= 3 && whole.len() < 60, "{} rounds", whole.len());
    for (line, expected) in whole.iter().zip(&expected) {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(record["model_hash"], expected["model_hash"]);
    }
    assert_eq!(run(folder.path(), "full", &settings)["model_hash"], reference["model_hash"]);
    assert_eq!(rounds(&folder.path().join("full")), expected);
}

#[test]
fn a_configuration_that_does_not_fit_on_the_disk_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let (code, message) = failure(on_a_full_disk(folder.path(), 1, &["new", "f.toml"]));
    assert!(code == 1 && message.contains("`f.toml`: cannot write"), "{message}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_checkpoint_that_does_not_fit_on_the_disk_leaves_no_half_file() {
    let folder = tempfile::tempdir().unwrap();
    let args = [&["run", "--out", "full", "--quiet"], SMALL, &["model.hidden=[100]"]].concat();
    let (code, message) = failure(on_a_full_disk(folder.path(), 16, &args));
    assert!(code == 1 && message.contains("round-000001.ckpt") && message.contains("cannot write"), "{message}");
    assert_eq!(rounds(&folder.path().join("full")).len(), 1);
    assert_eq!(std::fs::read_dir(folder.path().join("full/checkpoints")).unwrap().count(), 0);
    let reference = run(folder.path(), "reference", &["model.hidden=[100]"]);
    assert_eq!(run(folder.path(), "full", &["model.hidden=[100]"])["model_hash"], reference["model_hash"]);
}

#[test]
fn a_second_process_in_a_run_directory_is_turned_away() {
    let folder = tempfile::tempdir().unwrap();
    let args = [&["run", "--out", "a", "--quiet", "--resume"], SMALL, &["federation.rounds=1000000"]].concat();
    let mut first = fedproj(folder.path(), &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let metrics = folder.path().join("a/metrics.jsonl");
    let patience = Instant::now() + Duration::from_mins(1);
    while std::fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) == 0 {
        assert!(Instant::now() < patience && first.try_wait().unwrap().is_none(), "the first process does not run");
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = fedproj(folder.path(), &args).output().unwrap();
    first.kill().unwrap();
    first.wait().unwrap();
    let message = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{message}");
    assert!(message.contains("`a` is in use by another process") && message.contains("--out"), "{message}");
}

/// Three of five rounds, as a killed process leaves them.
fn unfinished(folder: &Path) -> Vec<&'static str> {
    let settings = [SMALL, &["federation.rounds=5"]].concat();
    let owned: Vec<String> = settings.iter().map(|s| (*s).to_owned()).collect();
    let config = fedproj_core::Config::from_layers(None, &owned).unwrap();
    let mut run = fedproj_core::Run::open(&folder.join("a"), &config, None, 1, false).unwrap();
    for _ in 0..3 {
        run.round(&|_| ()).unwrap();
    }
    settings
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let settings = unfinished(folder.path());
    let newest = folder.path().join("a/checkpoints/round-000003.ckpt");
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    let resume = [&["run", "--resume", "--out", "a"], &settings[..]].concat();
    let output = command::output(fedproj(folder.path(), &resume));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("round-000003.ckpt`: damaged checkpoint") && told.contains("set aside"), "{told}");
    assert!(folder.path().join("a/checkpoints/round-000003.ckpt.damaged").exists());
    let outcome = run(folder.path(), "a", &["federation.rounds=5"]);
    assert_eq!(outcome["model_hash"], run(folder.path(), "reference", &["federation.rounds=5"])["model_hash"]);
    assert_eq!(rounds(&folder.path().join("a")), rounds(&folder.path().join("reference")));
}

#[test]
fn a_run_that_was_begun_on_a_gpu_does_not_go_on_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let settings = unfinished(folder.path());
    let path = folder.path().join("a/manifest.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("\"isa\":", "\"gpu\":\"NVIDIA X, tf32\",\"isa\":", 1)).unwrap();
    let resume = [&["run", "--resume", "--out", "a", "--quiet", "--device", "cpu"], &settings[..]].concat();
    for command in [&resume[..], &["verify", "a", "--device", "cpu"]] {
        let (code, message) = failure(fedproj(folder.path(), command));
        assert!(
            code == 2 && message.contains("begun on NVIDIA X") && message.contains("--precision tf32"),
            "{message}"
        );
    }
}

#[test]
fn another_configuration_in_an_existing_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let settings = unfinished(folder.path());
    let before = std::fs::read(folder.path().join("a/metrics.jsonl")).unwrap();
    let other = [&["run", "--resume", "--out", "a", "--quiet"], &settings[..], &["seed=1"]].concat();
    let (code, message) = failure(fedproj(folder.path(), &other));
    assert!(code == 2 && message.contains("another configuration") && message.contains("--out"), "{message}");
    assert!(message.contains(": seed is 0 there, 1 here; choose"), "{message}");
    let (code, message) = failure(fedproj(folder.path(), &[&["run", "--out", "a"], &settings[..]].concat()));
    assert!(code == 2 && message.contains("unfinished run") && message.contains("--resume"), "{message}");
    assert_eq!(std::fs::read(folder.path().join("a/metrics.jsonl")).unwrap(), before);
    run(folder.path(), "a", &["federation.rounds=5"]);
    let (code, message) = failure(fedproj(folder.path(), &other));
    assert!(code == 2 && message.contains("another configuration"), "{message}");
}
