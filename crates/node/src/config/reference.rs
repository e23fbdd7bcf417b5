//! The reference page and the example file, made from the table of keys.

use std::fmt::Write as _;

use super::key::Key;
use super::keys::{KEYS, SECTIONS, TENANT_KEYS};

const OPENING: &str = "\
# Configuration

This page is generated from the table that the program reads its configuration by; a test compares
the two. `cascade serve --print-reference` prints it.

A node starts without a configuration: every key has a default. What is given later in this list
wins: built-in defaults, one TOML file (`--config FILE`, else the variable `CASCADE_CONFIG`), the
environment, flags of `cascade serve`. A key `dram.capacity` is `capacity` below `[dram]` in the
file, `CASCADE_DRAM_CAPACITY` in the environment, and has a flag where the table names one.

- `cascade serve --print-config` prints every key as it is set, and what set it, and exits.
- `packaging/cascade.toml` is a file with every key at its default.
- A key or section that does not exist is refused by name, with the nearest that does. So is a
  variable `CASCADE_SECTION_...` of a section that exists.
- `cascade doctor --config FILE` says whether this machine can carry what the file asks for.

## Values

| kind | written | notes |
|---|---|---|
| size | `\"512MiB\"`, `\"100MB\"`, `4096` | KiB is 1024, KB 1000; bytes without a unit |
| rate | `\"500MiB/s\"` | bytes a second |
| time | `\"500ms\"`, `\"30s\"`, `\"5min\"`, `\"1h\"` | the unit is required |
| share | `\"25%\"` | whole percent |
| permissions | `\"0600\"` | octal digits |
| path | `\"/var/lib/cascade\"` | absolute; a flag may be relative to where the command runs |
| list | `[\"alice\", 1005]` | in the file alone |

## Reload

`SIGHUP` (`systemctl reload cascade`) makes a node read its file again. Keys with `yes` under
*reload* change at once. A change of another key is logged by name and waits for a restart. A file
that is refused changes nothing.
";

const SOCKET: &str = "
### Where the socket is

`$XDG_RUNTIME_DIR` is a directory of one user alone that ends with the login: the right place where
there is one. Root has `/run/cascade`. Others get `/tmp/cascade-UID`: `/tmp` is shared, so the node
makes the directory with permissions 0700 and refuses one that belongs to someone else. A node and
its clients agree on the socket without a setting when they run as the same user with the same
`XDG_RUNTIME_DIR`; a service manager or a container often sets none, so name the socket there.
";

const SECRETS: &str = "
### What is refused

- An address beyond loopback without `security.token_file` or mutual TLS
  (`security.client_authority`). A token without a certificate travels unencrypted.
- A certificate without its private key, and the other way round.
- A file with a secret (token, private key, encryption key) that others than its owner and group
  can read, or that its group can write.
- An encryption key inside the directory that it encrypts.
";

/// `docs/configuration.md`.
pub fn reference() -> String {
    let mut page = OPENING.to_owned();
    for (section, meaning) in SECTIONS {
        let title = if *section == "tenant" { "[tenant]" } else { section };
        write!(page, "\n## `[{title}]`\n\n{meaning}\n\n").expect("a String takes everything");
        page.push_str("| key | what it is | default | bounds | flag | reload |\n");
        page.push_str("|---|---|---|---|---|---|\n");
        for key in KEYS.iter().chain(TENANT_KEYS).filter(|key| key.section() == *section) {
            append_row(&mut page, key);
        }
        page.push_str(match *section {
            "node" => SOCKET,
            "security" => SECRETS,
            _ => "",
        });
    }
    page
}

fn append_row(page: &mut String, key: &Key) {
    let words = |text: &str| text.replace('|', "\\|");
    let bounds = match (key.minimum, key.maximum) {
        (Some(least), Some(most)) => format!("{least} to {most}"),
        (Some(least), None) => format!("at least {least}"),
        (None, Some(most)) => format!("at most {most}"),
        (None, None) => String::new(),
    };
    let choices = match key.kind {
        super::Kind::Choice(choices) => format!(" One of `{}`.", choices.join("`, `")),
        _ => String::new(),
    };
    let default = match (key.default_rule, key.default) {
        (None, Some(value)) => format!("`{value}`"),
        _ => key.default_text().to_owned(),
    };
    writeln!(
        page,
        "| `{}` | {}{} | {} | {bounds} | {} | {} |",
        key.name(),
        words(key.meaning),
        choices,
        words(&default),
        key.flag.map(|flag| format!("`--{flag}`")).unwrap_or_default(),
        if key.is_live { "yes" } else { "" },
    )
    .expect("a String takes everything");
}

/// `packaging/cascade.toml`: every key at its default; keys without one are commented out.
pub fn example() -> String {
    let mut file = String::from(
        "# A configuration of Cascade with every key at its default.\n\
         # Generated: `cascade serve --print-example`. Reference: docs/configuration.md\n",
    );
    for (section, meaning) in SECTIONS {
        let is_tenant = *section == "tenant";
        file.push('\n');
        append_comment(&mut file, meaning);
        let head = if is_tenant { "# [[tenant]]".to_owned() } else { format!("[{section}]") };
        writeln!(file, "{head}").expect("a String takes everything");
        for key in KEYS.iter().chain(TENANT_KEYS).filter(|key| key.section() == *section) {
            append_comment(&mut file, key.meaning);
            let line = match key.default.and_then(|text| key.parse(text).ok()) {
                Some(value) => format!("{} = {}", key.name(), value.toml()),
                None => format!("# {} =    (default: {})", key.name(), key.default_text()),
            };
            writeln!(file, "{line}").expect("a String takes everything");
        }
    }
    file
}

/// A comment of at most a hundred columns a line.
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
