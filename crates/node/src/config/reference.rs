//! Generates the reference page and the example file from the table of keys.

use std::fmt::Write as _;

use super::key::ADVANCED;
use super::key::SettingKey;
use super::keys::{KEYS, SECTIONS, TENANT_KEYS};

const OPENING: &str = "\
# Configuration

This page is generated from the table of keys in the program, and a test compares the two.
`cascade serve --print-reference` prints it.

A node needs no configuration: every key has a default. Later sources override earlier ones:

1. built-in defaults
2. one TOML file: `--config FILE`, else the file that the variable `CASCADE_CONFIG` names
3. environment variables
4. flags of `cascade serve`

A setting has **one name everywhere**: `files_capacity` in the file, `CASCADE_FILES_CAPACITY` in
the environment, `--files-capacity` as a flag, and `files_capacity` in Python, for settings of
embedded stores. A normal setup needs only the first table below. Keys in `[advanced]` rarely need
to change, and each one says why. `cascade serve -h` lists the first table, `--help` both.

- `cascade serve --print-config` prints the value and the source of every key, and exits.
- `packaging/cascade.toml` is an example file with every key at its default.
- Unknown keys are refused, with the nearest existing name. So are variables `CASCADE_...` that are
  close to the variable of a key.
- Three variables set no key: `CASCADE_CONFIG`, `CASCADE_NODE` (the node of a client) and
  `CASCADE_CUDA_LIBRARY` (another library than `libcuda.so.1`, see `docs/gpu.md`).
- `cascade doctor --config FILE` checks whether this host supports the configuration.

## Values

| kind | examples | notes |
|---|---|---|
| size | `\"512MiB\"`, `\"100MB\"`, `4096` | KiB is 1024, KB is 1000; no unit: bytes |
| rate | `\"500MiB/s\"`, `1048576` | no unit: bytes per second |
| duration | `\"250ms\"`, `\"30s\"`, `\"5min\"`, `\"1h\"`, `\"7d\"`, `2.5` | no unit: seconds |
| share | `\"25%\"`, `25` | whole percent |
| permissions | `\"0600\"` | octal digits |
| path | `\"/var/lib/cascade\"` | absolute; a flag may be relative to the working directory |
| list | `[\"alice\", 1005]` | only in the file |

The file, the environment, flags and Python accept the same forms. In Python a duration may also be
a `datetime.timedelta`.

## Reload

On `SIGHUP` (`systemctl reload cascade`) a node reads its file again. Keys with `yes` under *reload*
change at once. A change of another key needs a restart, and the log names the key. If the file is
refused, the settings stay as they are. `cascade config set` changes the same keys until the next
restart or reload; for capacities see `docs/sizing.md`.
";

const SOCKET: &str = "
### Default socket

The default is in `$XDG_RUNTIME_DIR`, the directory of a login session that only its user can
access. Without it, root uses `/run/cascade` and other users `/tmp/cascade-UID`. `/tmp` is shared,
so the node creates the directory with permissions 0700, and refuses one that belongs to another
user.

A node and its clients find each other without a setting if they run as the same user with the same
`XDG_RUNTIME_DIR`. Service managers and containers often do not set this variable: set `socket`
there.

Clients (`cascadekv.connect()` and the commands that connect to a node) use the first of: their
argument, `CASCADE_NODE`, `CASCADE_SOCKET`, the default.
";

const SECRETS: &str = "
### What is refused

- A `listen` address that is not loopback, without `token_file` or mutual TLS (`tls_client_ca`). A
  token is sent unencrypted unless `tls_certificate` is set.
- A certificate without its private key, or a private key without its certificate.
- A token file that its group can write, or that other users can access. Its group may read it, as
  with permissions 0640.
- A private key or encryption key that any user except its owner can access. Use permissions 0600.
- An encryption key inside the directory that it encrypts.
";

/// `docs/configuration.md`.
pub fn reference() -> String {
    let mut page = OPENING.to_owned();
    for (section, meaning) in SECTIONS {
        let title = match *section {
            "" => "Settings".to_owned(),
            "tenant" => "`[[tenant]]`".to_owned(),
            other => format!("`[{other}]`"),
        };
        let why = if *section == ADVANCED { " why it is advanced |" } else { "" };
        let line = if why.is_empty() { "" } else { "---|" };
        write!(
            page,
            "\n## {title}\n\n{meaning}\n\n| key | description | default | bounds | reload |{why}\n\
             |---|---|---|---|---|{line}\n"
        )
        .expect("writing to a String cannot fail");
        for key in KEYS.iter().chain(TENANT_KEYS).filter(|key| key.section() == *section) {
            append_row(&mut page, key);
        }
        if section.is_empty() {
            page.push_str(SOCKET);
            page.push_str(SECRETS);
        }
    }
    page
}

fn append_row(page: &mut String, key: &SettingKey) {
    let words = |text: &str| text.replace('|', "\\|");
    let bounds = match (key.minimum, key.maximum) {
        (Some(least), Some(most)) => format!("{least} to {most}"),
        (Some(least), None) => format!("at least {least}"),
        (None, Some(most)) => format!("at most {most}"),
        (None, None) => String::new(),
    };
    let choices = match key.kind {
        super::ValueKind::Choice(choices) => format!(" One of `{}`.", choices.join("`, `")),
        _ => String::new(),
    };
    let default = match (key.default_rule, key.default) {
        (None, Some(value)) => format!("`{value}`"),
        _ => key.default_text().to_owned(),
    };
    let live = if key.is_live { "yes" } else { "" };
    let why = key.reason.map(|why| format!(" {} |", words(why))).unwrap_or_default();
    writeln!(
        page,
        "| `{}` | {}{choices} | {} | {bounds} | {live} |{why}",
        key.name(),
        words(key.meaning),
        words(&default),
    )
    .expect("writing to a String cannot fail");
}

/// `packaging/cascade.toml`: every key at its default. Keys without a fixed default are commented
/// out.
pub fn example() -> String {
    let mut file = String::from(
        "# Example configuration of Cascade: every key at its default.\n\
         # Generated by `cascade serve --print-example`. Reference: docs/configuration.md\n",
    );
    for (section, meaning) in SECTIONS {
        let is_tenant = *section == "tenant";
        file.push('\n');
        append_comment(&mut file, meaning);
        match *section {
            "" => file.push('\n'),
            _ if is_tenant => file.push_str("# [[tenant]]\n"),
            _ => writeln!(file, "[{section}]").expect("writing to a String cannot fail"),
        }
        for key in KEYS.iter().chain(TENANT_KEYS).filter(|key| key.section() == *section) {
            append_comment(&mut file, key.meaning);
            if let Some(why) = key.reason {
                append_comment(&mut file, why);
            }
            let line = match key.default.and_then(|text| key.parse(text).ok()) {
                Some(value) => format!("{} = {}", key.name(), value.toml()),
                None => format!("# {} =    (default: {})", key.name(), key.default_text()),
            };
            writeln!(file, "{line}").expect("writing to a String cannot fail");
        }
    }
    file
}

/// Appends a comment, wrapped so that no line has more than 98 columns.
fn append_comment(file: &mut String, text: &str) {
    let mut line = String::from("#");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > 98 {
            file.push_str(&line);
            file.push('\n');
            line.truncate(1);
        }
        line.push(' ');
        line.push_str(word);
    }
    file.push_str(&line);
    file.push('\n');
}
