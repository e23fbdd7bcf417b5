//! `cascade files`: what an operator needs beside the program, which carries it.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::{EXIT_OK, Failure, Screen, write_file};

/// The program that the systemd unit starts.
const PROGRAM_OF_THE_UNIT: &str = "/opt/cascade/bin/cascade";

/// A file, its use, and the command that puts it into its place.
struct OperatorFile {
    name: &'static str,
    what: &'static str,
    /// Installs `{}`, the path of the written file.
    next: &'static str,
    text: &'static str,
}

/// In the order of their installation: the unit needs the user and the configuration.
const FILES: &[OperatorFile] = &[
    OperatorFile {
        name: "cascade.sysusers",
        what: "the user and group `cascade`, for systemd-sysusers",
        next: "install -Dm 0644 {} /usr/lib/sysusers.d/cascade.conf && systemd-sysusers",
        text: include_str!("../../../packaging/systemd/cascade.sysusers"),
    },
    OperatorFile {
        name: "cascade.toml",
        what: "an example configuration: every setting with its default",
        next: "install -Dm 0640 -g cascade {} /etc/cascade/cascade.toml",
        text: include_str!("../../../packaging/cascade.toml"),
    },
    OperatorFile {
        name: "cascade.service",
        what: "the systemd unit of a node",
        next: "install -Dm 0644 {} /etc/systemd/system/cascade.service && \
               systemctl daemon-reload",
        text: include_str!("../../../packaging/systemd/cascade.service"),
    },
    OperatorFile {
        name: "scrape.yml",
        what: "Prometheus: scrapes a node and loads the alerts",
        next: "merge {} into /etc/prometheus/prometheus.yml",
        text: include_str!("../../../packaging/prometheus/scrape.yml"),
    },
    OperatorFile {
        name: "alerts.yml",
        what: "Prometheus: the alerts",
        next: "install -Dm 0644 {} /etc/prometheus/alerts.yml",
        text: include_str!("../../../packaging/prometheus/alerts.yml"),
    },
    OperatorFile {
        name: "grafana.json",
        what: "Grafana: a dashboard",
        next: "Dashboards > New > Import in Grafana, and choose {}",
        text: include_str!("../../../packaging/grafana/cascade.json"),
    },
];

/// Whether and where to write the files.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade files
      List the files.
  cascade files --install ./operator
      Write all of them into a directory, and print for each what to do with it.

This writes into DIR only. An existing file is not overwritten without --force: then none is
written, and the exit code is 1.")]
pub(super) struct FilesArgs {
    /// Write the files into this directory, which is created if needed.
    #[arg(long, value_name = "DIR")]
    install: Option<PathBuf>,
    /// Overwrite existing files.
    #[arg(long, requires = "install")]
    force: bool,
}

pub(super) fn run(args: &FilesArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let Some(directory) = &args.install else {
        for file in FILES {
            screen.line(format!("{:<17} {}", file.name, file.what))?;
        }
        screen.notice("to write them: cascade files --install DIR")?;
        return Ok(EXIT_OK);
    };
    install(directory, args.force)?;
    for file in FILES {
        let path = directory.join(file.name).display().to_string();
        screen.line(format!("{path}: {}", file.what))?;
        screen.line(format!("  {}", file.next.replace("{}", &path)))?;
    }
    if let Some(program) = std::env::current_exe().ok().filter(|it| !is_that_of_the_unit(it)) {
        screen.line(format!(
            "cascade.service starts {PROGRAM_OF_THE_UNIT}, but this program is {}: change \
             ExecStartPre and ExecStart",
            program.display()
        ))?;
    }
    screen.line("After the edits of /etc/cascade/cascade.toml: systemctl enable --now cascade")?;
    Ok(EXIT_OK)
}

fn is_that_of_the_unit(program: &Path) -> bool {
    Path::new(PROGRAM_OF_THE_UNIT).canonicalize().is_ok_and(|it| it == program)
}

/// Writes all files, or none if one exists and `force` is not set.
fn install(directory: &Path, force: bool) -> Result<(), Failure> {
    let paths = || FILES.iter().map(|file| directory.join(file.name));
    // A link that leads nowhere exists, too.
    let existing: Vec<_> = paths().filter(|path| path.symlink_metadata().is_ok()).collect();
    if !existing.is_empty() && !force {
        let existing: Vec<_> = existing.iter().map(|path| path.display().to_string()).collect();
        return Err(Failure::Declined(format!(
            "these files exist, and nothing was written: {}\n  give another directory, or --force \
             to overwrite them",
            existing.join(", ")
        )));
    }
    std::fs::create_dir_all(directory).map_err(|source| Failure::write(directory, source))?;
    for (file, path) in FILES.iter().zip(paths()) {
        if force {
            write_file(&path, file.text.as_bytes())?;
        } else {
            create(&path, file.text).map_err(|source| Failure::write(&path, source))?;
        }
    }
    Ok(())
}

/// Creates a file; fails if another process has made it meanwhile.
fn create(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).open(path)?.write_all(text.as_bytes())
}
