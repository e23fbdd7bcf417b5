//! The configuration file: TOML, in which each key knows its line.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::key::Key;
use super::keys::{ADVANCED, KEYS, SECTIONS, TENANT_KEYS, nearest};
use super::renamed::{renamed, was_section};
use super::settings::{Settings, Source, Values};
use super::value::{Kind, Value};

/// A file of settings is short; a larger one was given by mistake.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Sets what the file gives.
pub(super) fn read(path: &Path, settings: &mut Settings) -> Result<(), ConfigError> {
    let text = text(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let document = Document { path, text: &text };
    let table = DeTable::parse(&text).map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        line: document.line(&error.span().unwrap_or_default()),
        reason: error.message().to_owned(),
    })?;
    for (name, value) in table.get_ref() {
        document.entry(name, value, settings)?;
    }
    Ok(())
}

fn text(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > FILE_BYTES_MAX {
        let reason = format!("it is larger than {FILE_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    fs::read_to_string(path)
}

/// A file that is being read.
struct Document<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Document<'_> {
    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.as_bytes().iter().take(span.start);
        1 + before.filter(|byte| **byte == b'\n').count()
    }

    fn place(&self, span: &Range<usize>) -> Source {
        Source::File { path: self.path.to_owned(), line: self.line(span) }
    }

    /// Reads one name at the top of the file: a key, or the header of a table.
    fn entry(
        &self,
        name: &Spanned<Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) -> Result<(), ConfigError> {
        let (name, span) = (name.get_ref().as_ref(), name.span());
        let misplaced = |reason: String| {
            Err(ConfigError::Value { key: name.to_owned(), reason, place: self.place(&span) })
        };
        match value.get_ref() {
            DeValue::Array(tenants) if name == "tenant" => {
                for tenant in tenants {
                    let DeValue::Table(table) = tenant.get_ref() else {
                        return misplaced("a tenant is a table; write [[tenant]]".to_owned());
                    };
                    let mut values = Values::default();
                    self.keys(name, table, &mut values)?;
                    settings.tenants.push(values);
                }
                Ok(())
            }
            _ if name == "tenant" => misplaced("write [[tenant]], one for each tenant".to_owned()),
            DeValue::Table(table) if name == ADVANCED => self.keys(name, table, &mut settings.node),
            _ if name == ADVANCED => {
                misplaced("is a table; write [advanced] and its keys below".to_owned())
            }
            DeValue::Table(table) if was_section(name) => self.old_section(name, &span, table),
            DeValue::Table(_) if !KEYS.iter().any(|key| key.path == name) => {
                let sections = SECTIONS.iter().map(|(section, _)| *section);
                Err(self.unknown("table", name, nearest(name, sections), &span))
            }
            _ => self.key("", name, &span, value, &mut settings.node),
        }
    }

    /// Refuses a table that there was once, by the new name of its first key.
    fn old_section(
        &self,
        section: &str,
        span: &Range<usize>,
        table: &DeTable<'_>,
    ) -> Result<(), ConfigError> {
        for name in table.keys() {
            let path = format!("{section}.{}", name.get_ref());
            self.refuse_renamed(&path, &name.span())?;
        }
        let reason = "is no table; keys stand at the top of the file or below [advanced]";
        let (key, reason) = (section.to_owned(), reason.to_owned());
        Err(ConfigError::Value { key, reason, place: self.place(span) })
    }

    fn keys(
        &self,
        section: &str,
        table: &DeTable<'_>,
        values: &mut Values,
    ) -> Result<(), ConfigError> {
        for (name, value) in table {
            self.key(section, name.get_ref(), &name.span(), value, values)?;
        }
        Ok(())
    }

    /// Reads one key below the header `section`.
    fn key(
        &self,
        section: &str,
        name: &str,
        span: &Range<usize>,
        value: &Spanned<DeValue<'_>>,
        values: &mut Values,
    ) -> Result<(), ConfigError> {
        let (path, keys) = match section {
            "tenant" => (format!("tenant.{name}"), TENANT_KEYS),
            _ => (name.to_owned(), KEYS),
        };
        let Some(key) = keys.iter().find(|key| key.path == path) else {
            self.refuse_renamed(&path, span)?;
            let found = nearest(&path, keys.iter().map(|key| key.path));
            return Err(self.unknown("key", &path, found, span));
        };
        let place = self.place(&value.span());
        let wrong = |reason| ConfigError::Value { key: path.clone(), reason, place: place.clone() };
        if key.section() != section {
            return Err(wrong(belongs(key.section())));
        }
        let value = read_value(key, value.get_ref()).map_err(wrong)?;
        values.set(key, value, place);
        Ok(())
    }

    fn refuse_renamed(&self, old: &str, span: &Range<usize>) -> Result<(), ConfigError> {
        let Some(new) = renamed(old) else { return Ok(()) };
        let is_advanced = KEYS.iter().any(|key| key.path == new && key.is_advanced());
        let advice = match is_advanced {
            true => ", below [advanced]",
            false if new.starts_with("tenant.") => "",
            false => ", at the top of the file",
        };
        let (old, new) = (old.to_owned(), new.to_owned());
        Err(ConfigError::Renamed { old, new, advice, place: self.place(span) })
    }

    fn unknown(
        &self,
        what: &'static str,
        name: &str,
        nearest: Option<&str>,
        span: &Range<usize>,
    ) -> ConfigError {
        let nearest = nearest.map(str::to_owned);
        ConfigError::Unknown { what, name: name.to_owned(), nearest, place: self.place(span) }
    }
}

/// Where a key that stands below the wrong header has to stand.
fn belongs(section: &str) -> String {
    match section {
        "" => "stands at the top of the file, above any header".to_owned(),
        section => format!("stands below [{section}]"),
    }
}

fn read_value(key: &Key, value: &DeValue<'_>) -> Result<Value, String> {
    let wrong = || format!("{} is not {}", value.type_str(), key.kind.description());
    match value {
        DeValue::Array(parts) if key.kind == Kind::List => {
            let texts = parts.iter().map(|part| scalar(part.get_ref()).ok_or_else(wrong));
            texts.collect::<Result<_, _>>().map(Value::List)
        }
        DeValue::String(text) if key.kind != Kind::List => key.parse(text),
        DeValue::Float(number) if !key.kind.is_quoted() || key.kind == Kind::Duration => {
            key.parse(number.as_str())
        }
        DeValue::Integer(number) if key.kind == Kind::Mode => match number.radix() {
            8 => key.parse(number.as_str()),
            _ => Err(format!("write it in quotes and octal digits: \"0{}\"", number.as_str())),
        },
        _ if key.kind.is_quoted() => Err(wrong()),
        _ => key.parse(&scalar(value).ok_or_else(wrong)?),
    }
}

/// A text, whole number or truth value as text.
fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            let number = i64::from_str_radix(number.as_str(), number.radix()).ok()?;
            Some(number.to_string())
        }
        DeValue::Boolean(is_on) => Some(is_on.to_string()),
        _ => None,
    }
}
