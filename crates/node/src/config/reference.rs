//! The reference page and the example file, made from the table of keys.

use std::fmt::Write as _;

use super::key::Key;
use super::keys::{ADVANCED, KEYS, SECTIONS, TENANT_KEYS};

const OPENING: &str = "\
# Configuration

This page is generated from the table that the program reads its configuration by; a test compares
the two. `cascade serve --print-reference` prints it.

A node starts without a configuration: every key has a default. What is given later in this list
wins: built-in defaults, one TOML file (`--config FILE`, else the variable `CASCADE_CONFIG`), the
environment, flags of `cascade serve`.

A setting has **one name everywhere**: `files_capacity` in the file, `CASCADE_FILES_CAPACITY` in
the environment, `--files-capacity` as a flag, and `files_capacity` in Python where an embedded
store has it. An operator has to know only the first table. The keys in `[advanced]` are for
measurements; each says why it is rarely changed. `cascade serve -h` lists the first table, `--help`
both.

- `cascade serve --print-config` prints every key as it is set, and what set it, and exits.
- `packaging/cascade.toml` is a file with every key at its default.
- A key that does not exist is refused by name, with the nearest that does. So is a variable
  `CASCADE_...` that is almost a key's.
- `cascade doctor --config FILE` says whether this machine can carry what the file asks for.

## Values

| kind | written | notes |
|---|---|---|
| size | `\"512MiB\"`, `\"100MB\"`, `4096` | KiB is 1024, KB 1000; bytes without a unit |
| rate | `\"500MiB/s\"`, `1048576` | bytes a second |
| duration | `\"250ms\"`, `\"30s\"`, `\"5min\"`, `\"1h\"`, `\"7d\"`, `2.5` | no unit: seconds |
| share | `\"25%\"`, `25` | whole percent |
| permissions | `\"0600\"` | octal digits |
| path | `\"/var/lib/cascade\"` | absolute; a flag may be relative to where the command runs |
| list | `[\"alice\", 1005]` | in the file alone |

The same forms are taken in the file, in the environment, after flags, and in Python, where a
duration may also be a `datetime.timedelta`.

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

Clients (`cascadekv.connect()` and the commands that ask a node) take the socket that they are
given, else the one of `CASCADE_NODE`, else the one of `CASCADE_SOCKET`, else the default.
";

const SECRETS: &str = "
### What is refused

- An address beyond loopback without `token_file` or mutual TLS (`tls_client_ca`). A token without
  a certificate travels unencrypted.
- A certificate without its private key, and the other way round.
- A file with a secret (token, private key, encryption key) that others than its owner and group
  can read, or that its group can write.
- An encryption key inside the directory that it encrypts.
";

/// `docs/configuration.md`.
pub fn reference() -> String {
    let mut page = OPENING.to_owned();
    for (section, meaning) in SECTIONS {
        let title = match *section {
            "" => "Settings of an operator".to_owned(),
            "tenant" => "`[[tenant]]`".to_owned(),
            other => format!("`[{other}]`"),
        };
        let why = if *section == ADVANCED { " why it is advanced |" } else { "" };
        let line = if why.is_empty() { "" } else { "---|" };
        write!(
            page,
            "\n## {title}\n\n{meaning}\n\n| key | what it is | default | bounds | reload |{why}\n\
             |---|---|---|---|---|{line}\n"
        )
        .expect("a String takes everything");
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
    let live = if key.is_live { "yes" } else { "" };
    let why = key.reason.map(|why| format!(" {} |", words(why))).unwrap_or_default();
    writeln!(
        page,
        "| `{}` | {}{choices} | {} | {bounds} | {live} |{why}",
        key.name(),
        words(key.meaning),
        words(&default),
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
        match *section {
            "" => file.push('\n'),
            _ if is_tenant => file.push_str("# [[tenant]]\n"),
            _ => writeln!(file, "[{section}]").expect("a String takes everything"),
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
