//! The status page in a real browser, if one is installed: content, refresh, width.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cascade_node::config::SecurityConfig;
use serde_json::Value;

use super::served::Served;

/// The names of browsers on different systems.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn browser() -> Option<&'static str> {
    let exists = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    let found = BROWSERS.into_iter().find(exists);
    if found.is_none() {
        println!("skipped: none of {BROWSERS:?} is installed (Debian: apt-get install chromium)");
    }
    found
}

/// The output of a browser that loaded a page.
struct Visit {
    dom: String,
    log: String,
}

fn visit(browser: &str, url: &str, extra: &[&str]) -> Visit {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--no-first-run", "--enable-logging=stderr", "--v=0", "--hide-scrollbars"])
        // In the browser's virtual time: long enough for the page to refresh three times.
        .args(["--virtual-time-budget=4000", "--window-size=1200,1500"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(extra)
        .arg(url)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let visit = Visit { dom: text(&output.stdout), log: text(&output.stderr) };
    assert!(output.status.success(), "{}: {}", output.status, visit.log);
    visit
}

impl Visit {
    /// The messages of the page's console.
    fn console(&self) -> Vec<&str> {
        self.log.lines().filter(|line| line.contains("CONSOLE")).collect()
    }

    /// The values on the page with their paths in the status.
    fn values(&self) -> Vec<(&str, &str)> {
        let mut values = Vec::new();
        for rest in self.dom.split("data-path=\"").skip(1) {
            let (path, rest) = rest.split_once('"').unwrap();
            let (attributes, rest) = rest.split_once('>').unwrap();
            let shown = rest.split('<').next().unwrap();
            let value = attributes.split("data-value=\"").nth(1);
            values.push((path, value.map_or(shown, |value| value.split('"').next().unwrap())));
        }
        values
    }
}

fn at<'a>(status: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(status, |value, step| match step.parse::<usize>() {
        Ok(index) => &value[index],
        Err(_) => &value[step],
    })
}

#[test]
fn the_page_shows_the_status_and_its_plots_in_a_browser() {
    let Some(browser) = browser() else { return };
    let served = Served::start();
    served.get_over_tcp("/status.json");
    served.put(0..180);
    served.read(0..60);
    served.settle();
    // The samples of the history are at least a second apart.
    cascade_runtime::sleep(Duration::from_secs(1));
    let visit = visit(browser, &format!("http://{}/", served.address()), &["--dump-dom"]);
    assert_eq!(visit.console(), [""; 0], "an error in the page");
    assert!(visit.dom.contains("data-refreshed="), "the page refreshed itself");
    let status: Value = serde_json::from_str(&served.get_over_tcp("/status.json").body).unwrap();
    let values = visit.values();
    assert!(values.len() > 20, "{values:?}");
    for (path, shown) in values {
        let expected = match at(&status, path) {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        assert_eq!(shown, expected, "{path}");
    }
    for plot in ["hits", "rates"] {
        let svg = visit.dom.split(&format!("data-plot=\"{plot}\"")).nth(1);
        let svg = svg.unwrap().split("</svg>").next().unwrap();
        assert!(svg.matches("<path").count() >= 2 && svg.contains(" d=\"M"), "{plot}: {svg}");
    }
    assert!(visit.dom.contains("class=\"arrow"), "the flows are drawn");
    assert!(!visit.dom.contains("http://"), "the page loads no external resource");
}

/// The tiles and tables were wider than the screen of a phone.
#[test]
fn the_page_is_no_wider_than_a_phone() {
    const WIDTH: u32 = 390;
    let Some(browser) = browser() else { return };
    let served = Served::start();
    served.get("/status.json");
    served.put(0..180);
    served.read(0..60);
    served.settle();
    // A headless window has a minimum width; a frame in it has not.
    let page = served.get("/").body.replace('&', "&amp;").replace('"', "&quot;");
    let measure = "document.title = frame.contentDocument.documentElement.scrollWidth";
    let outer = format!(
        "<iframe id=frame width={WIDTH} height=3000 style=border:0 onload='{measure}' \
         srcdoc=\"{page}\"></iframe>"
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("phone.html");
    fs::write(&path, outer).unwrap();
    let url = format!("file://{}", path.display());
    let dom = visit(browser, &url, &["--dump-dom"]).dom;
    let title = dom.split("<title>").nth(1).and_then(|rest| rest.split('<').next());
    let wide: u32 = title.and_then(|title| title.parse().ok()).unwrap_or_else(|| panic!("{dom}"));
    assert!(wide <= WIDTH, "{wide} pixels");
}

/// Makes the picture in the documentation. Check it by eye.
#[test]
#[ignore = "takes a minute: makes docs/images/status-page.png"]
fn the_picture_of_the_page_shows_a_busy_node() {
    let Some(browser) = browser() else { return };
    let served = Served::start_of(32 << 20, SecurityConfig::default(), |_| {});
    let clock = Instant::now();
    let mut round = 0;
    while clock.elapsed() < Duration::from_secs(75) {
        served.get_over_tcp("/status.json");
        // New turns of many conversations: mostly known blocks, some of them old.
        let busy = 2 + (round / 12) % 4;
        for part in 0..busy {
            let end = 400 + round * 9 + part * 5;
            let behind = [30, 60, 400, 90][((round + part) % 4) as usize];
            served.read(end - behind..end - behind + 30);
            served.put(end..end + 5);
        }
        round += 1;
        cascade_runtime::sleep(Duration::from_millis(300));
    }
    let target: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images/status-page.png");
    let shot = format!("--screenshot={}", target.display());
    visit(browser, &format!("http://{}/", served.address()), &[&shot]);
    assert!(fs::metadata(target).unwrap().len() > 10_000);
}
