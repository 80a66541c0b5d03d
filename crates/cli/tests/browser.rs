//! Pages in a real browser: no error, no request, tables that sort, text that can be read in light and dark and on a phone.
//!
//! A script goes into the head of a copy of the page, and the copy into a frame, since no window of Chromium is as narrow as
//! a phone; the frame tells the window around it what the script found. Skipped where no Chromium is installed.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up fails its test")]

mod command;
mod page;

use command::stdout;
use page::Served;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

const CHECKS: &str = include_str!("browser/checks.js");

/// The window around the page: it writes what the page says into its own document, which is dumped.
const AROUND: &str = "<!DOCTYPE html><meta charset=\"utf-8\"><pre id=\"verdict\"></pre><script>\
    addEventListener('message', e => document.getElementById('verdict').textContent = JSON.stringify(e.data))</script>\
    <iframe src=\"page.html\" width=\"WIDTH\" height=\"900\"></iframe>";

/// A browser on the search path.
fn browser() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = std::env::var_os("PATH")?;
    let found =
        std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name))).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: none of {names:?} is installed");
    }
    found
}

fn headless(browser: &Path) -> Command {
    let mut command = Command::new(browser);
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,1000"]);
    // Nothing beyond loopback is asked: no updates, no account, no experiments.
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]);
    command
}

/// What the script finds on a page in a frame of a width, and what the browser logs as console messages.
fn look(browser: &Path, html: &str, width: u32, is_dark: bool) -> (Value, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let page = html.replacen("<head>", &format!("<head><script>{CHECKS}</script>"), 1);
    fs::write(folder.path().join("page.html"), page).unwrap();
    let around = folder.path().join("around.html");
    fs::write(&around, AROUND.replace("WIDTH", &width.to_string())).unwrap();
    let output = headless(browser)
        .args(["--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom"])
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!is_dark)))
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .arg(format!("file://{}", around.display()))
        .output()
        .unwrap();
    let (dom, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let verdict = dom.split("<pre id=\"verdict\">").nth(1).and_then(|rest| rest.split("</pre>").next()).unwrap_or("");
    let verdict = verdict.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let verdict = serde_json::from_str(&verdict).unwrap_or_else(|e| panic!("no verdict ({e}): {verdict:?}\n{log}"));
    let console = log.lines().filter(|line| line.contains(":CONSOLE")).map(str::to_owned).collect();
    (verdict, console)
}

/// A page is as it should be at a desk and on a phone, in light and dark.
fn check(browser: &Path, html: &str, n_sorted_min: u64, n_hovered_min: u64) {
    for (width, is_dark) in [(1280, false), (1280, true), (390, true)] {
        let (verdict, console) = look(browser, html, width, is_dark);
        let told = format!("{width} px, dark {is_dark}: {verdict} {console:?}");
        assert_eq!(verdict["complaints"].as_array().map(Vec::len), Some(0), "{told}");
        assert!(console.is_empty(), "{told}");
        assert_eq!(verdict["width"], width, "{told}");
        assert_eq!(verdict["is_dark"], is_dark, "{told}");
        assert!(verdict["n_sorted"].as_u64().unwrap() >= n_sorted_min, "{told}");
        assert!(verdict["n_hovered"].as_u64().unwrap() >= n_hovered_min, "{told}");
        // The page has text, and its colours were found.
        assert!((4.5..21.1).contains(&verdict["least_contrast"].as_f64().unwrap()), "{told}");
    }
}

#[test]
fn the_page_of_a_comparison_works_everywhere() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    let quick = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results/table1-cifar10-quick");
    let text = stdout(folder.path(), &["report", quick.to_str().unwrap(), "--out", "quick"]);
    assert!(text.contains("FedProj"), "{text}");
    check(&browser, &fs::read_to_string(folder.path().join("quick/report.html")).unwrap(), 20, 3);
    let sweep = ["sweep.method.name=[fedavg,fedproj]", "sweep.data.partition.beta=[0.3,0.5]", "seeds=0,1"];
    let clients = ["federation.evaluate_clients=true"];
    stdout(folder.path(), &[&["run", "--out", "runs"], command::SMALL, &sweep, &clients].concat());
    stdout(folder.path(), &["report", "runs", "--out", "swept", "--title", "</title><script>alert(1)</script>"]);
    check(&browser, &fs::read_to_string(folder.path().join("swept/report.html")).unwrap(), 20, 18);
}

#[test]
fn the_page_of_the_pilot_study_works_everywhere() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    stdout(folder.path(), &["reproduce", "pilot", "--seeds", "1", "--out", "pilot"]);
    check(&browser, &fs::read_to_string(folder.path().join("pilot/report.html")).unwrap(), 6, 10);
}

/// A run that has done four of five rounds, and its last line.
fn unfinished_run(folder: &Path) -> String {
    stdout(folder, &[&["run", "--out", "run"], command::SMALL, &["federation.rounds=5"]].concat());
    fs::remove_file(folder.join("run/summary.json")).unwrap();
    let metrics = fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap();
    let (done, last) = metrics.trim_end().rsplit_once('\n').unwrap();
    fs::write(folder.join("run/metrics.jsonl"), format!("{done}\n")).unwrap();
    format!("{last}\n")
}

#[test]
fn the_page_of_a_run_works_everywhere() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    unfinished_run(folder.path());
    let watch = Served::start(folder.path(), &["watch", "run"]);
    let body = |path| watch.get(path).split_once("\r\n\r\n").unwrap().1.to_owned();
    // A copy in a file has no events.
    let script = format!("<script>class EventSource {{ addEventListener() {{}} }}\n{}</script>", body("/live.js"));
    let html = body("/").replace("<script src=\"live.js\" defer></script>", "");
    check(&browser, &html.replace("</body>", &format!("{script}</body>")), 0, 4);
}

#[test]
fn the_page_of_a_run_shows_a_new_round_by_itself() {
    let Some(browser) = browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    let last = unfinished_run(folder.path());
    let watch = Served::start(folder.path(), &["watch", "run"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let ((tell, told), (allow, allowed)) = (channel(), channel());
    let upstream = watch.address.clone();
    // The browser's requests pass through here. It writes its document once a picture is loaded, which we delay.
    std::thread::spawn(move || {
        let (tell, allowed) = (Mutex::new(tell), Mutex::new(allowed));
        std::thread::scope(|scope| {
            for visit in listener.incoming() {
                let (tell, allowed, upstream) = (&tell, &allowed, &upstream);
                scope.spawn(move || pass_on(visit.unwrap(), upstream, tell, allowed));
            }
        });
    });
    let follow = std::thread::spawn(move || {
        let wait_for = |words: &str| while !told.recv().unwrap().contains(words) {};
        wait_for("Round 5 of 5");
        let path = folder.path().join("run/metrics.jsonl");
        fs::OpenOptions::new().append(true).open(path).unwrap().write_all(last.as_bytes()).unwrap();
        fs::write(folder.path().join("run/summary.json"), "{}").unwrap();
        wait_for("All 5 rounds are done");
        allow.send(()).unwrap();
        folder
    });
    let profile = tempfile::tempdir().unwrap();
    let output = headless(&browser)
        .arg("--dump-dom")
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("http://{address}/"))
        .output()
        .unwrap();
    follow.join().unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    assert!(dom.contains("<title>All 5 rounds are done") && dom.contains("badge finished"), "{dom}");
}

/// Passes a request on, without the headers that forbid our picture. Tells every line of events. The picture is answered
/// when it is allowed.
fn pass_on(mut visit: TcpStream, upstream: &str, tell: &Mutex<Sender<String>>, allowed: &Mutex<Receiver<()>>) {
    let mut request = String::new();
    BufReader::new(&visit).read_line(&mut request).unwrap();
    let path = request.split(' ').nth(1).unwrap_or("/");
    if path == "/late.png" {
        allowed.lock().unwrap().recv().unwrap();
        // The event came first; its script runs before that of the picture's end.
        std::thread::sleep(std::time::Duration::from_millis(500));
        return;
    }
    let mut server = TcpStream::connect(upstream).unwrap();
    write!(server, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    if path == "/" {
        let mut page = String::new();
        server.read_to_string(&mut page).unwrap();
        let page = page.split_once("\r\n\r\n").unwrap().1.replace("</body>", "<img src=\"late.png\"></body>");
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n";
        return visit.write_all((head.to_owned() + &page).as_bytes()).unwrap();
    }
    let (mut server, mut line) = (BufReader::new(server), Vec::new());
    // The browser may have gone.
    while server.read_until(b'\n', &mut line).unwrap() > 0 && visit.write_all(&line).is_ok() {
        drop(tell.lock().unwrap().send(String::from_utf8_lossy(&line).into_owned()));
        line.clear();
    }
}

/// Each check can fail.
#[test]
fn a_page_with_faults_is_found_out() {
    let Some(browser) = browser() else { return };
    let page = "<html><head><meta http-equiv=\"Content-Security-Policy\" content=\"img-src data:\"></head><body>\
        <p style=\"color: #aaa\">pale</p><div style=\"width: 3000px\">wide</div><img src=\"http://localhost:9/x.png\">\
        <table><thead><tr><th><button>n</button></th></tr></thead><tbody><tr><td>2</td></tr><tr><td>1</td></tr></tbody>\
        </table><script>console.error('odd'); nothing();</script></body></html>";
    let (verdict, console) = look(&browser, page, 390, false);
    assert!(console.iter().any(|line| line.contains("nothing is not defined")), "{console:?}");
    let complaints = verdict["complaints"].to_string();
    for fault in
        ["contrast:", "overflow:", "request: http://localhost:9", "sort: not ascending", "console: odd", "nothing"]
    {
        assert!(complaints.contains(fault), "{fault} in {complaints}");
    }
}
