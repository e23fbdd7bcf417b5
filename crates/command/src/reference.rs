//! The reference page of the command, generated from the clap definition.

use std::fmt::Write as _;

use crate::definition;

/// The text of `docs/cli.md`: the help of every command, as the program prints it.
pub fn reference() -> String {
    let mut page = String::from(
        "# The command `cascade`\n\n\
         The output of `--help` for every command. This page is generated: a test compares it with \
         the program and,\nwhen they differ, writes a new page below `target/tmp`.\n",
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
        .expect("writing to a String does not fail");
    let is_documented =
        |child: &&mut clap::Command| child.get_name() != "help" && !child.is_hide_set();
    for child in command.get_subcommands_mut().filter(is_documented) {
        let path = format!("{path} {}", child.get_name());
        append(page, child, &path, (level + 1).min(4));
    }
}
