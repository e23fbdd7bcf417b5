//! The reference page of the command, made from the definition that parses it.

use std::fmt::Write as _;

use crate::cli::definition;

/// `docs/cli.md`: every command's help, as the program prints it.
pub fn reference() -> String {
    let mut page = String::from(
        "# The command `cascade`\n\n\
         This page is what `--help` prints, for every command. It is generated: a test compares it \
         with the program\nand writes a new one when they differ.\n",
    );
    let mut command = definition().term_width(100);
    command.build();
    append(&mut page, &mut command, "cascade", 2);
    page
}

fn append(page: &mut String, command: &mut clap::Command, path: &str, level: usize) {
    let help = command.render_long_help().to_string();
    let help: Vec<&str> = help.lines().map(str::trim_end).collect();
    let (mark, help) = ("#".repeat(level), help.join("\n"));
    write!(page, "\n{mark} `{path}`\n\n```text\n{}\n```\n", help.trim_end())
        .expect("a String takes everything");
    let is_told = |below: &&mut clap::Command| below.get_name() != "help" && !below.is_hide_set();
    for below in command.get_subcommands_mut().filter(is_told) {
        let path = format!("{path} {}", below.get_name());
        append(page, below, &path, (level + 1).min(4));
    }
}
