//! The configuration file: TOML, in which each key knows its line.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::key::Key;
use super::keys::{KEYS, SECTIONS, TENANT_KEYS, nearest};
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
        document.section(name.get_ref(), &name.span(), value, settings)?;
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

    fn section(
        &self,
        name: &str,
        span: &Range<usize>,
        value: &Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) -> Result<(), ConfigError> {
        let sections = || SECTIONS.iter().map(|(section, _)| *section);
        let misplaced = |reason: String| {
            Err(ConfigError::Value { key: name.to_owned(), reason, place: self.place(span) })
        };
        match value.get_ref() {
            DeValue::Array(tenants) if name == "tenant" => {
                for tenant in tenants {
                    let DeValue::Table(table) = tenant.get_ref() else {
                        return misplaced("a tenant is a table; write [[tenant]]".to_owned());
                    };
                    let mut values = Values::default();
                    self.keys(name, table, TENANT_KEYS, &mut values)?;
                    settings.tenants.push(values);
                }
                Ok(())
            }
            _ if name == "tenant" => misplaced("write [[tenant]], one for each tenant".to_owned()),
            DeValue::Table(table) if sections().any(|section| section == name) => {
                self.keys(name, table, KEYS, &mut settings.node)
            }
            DeValue::Table(_) => {
                Err(self.unknown("section", name, nearest(name, sections()), span))
            }
            _ if sections().any(|section| section == name) => {
                misplaced(format!("is a section; write [{name}] and its keys below"))
            }
            _ => {
                // A key outside of any section, which may be right in one.
                let paths = KEYS.iter().map(|key| key.path);
                let found = nearest(&format!(".{name}"), paths);
                Err(self.unknown("key", name, found, span))
            }
        }
    }

    fn keys(
        &self,
        section: &str,
        table: &DeTable<'_>,
        keys: &'static [Key],
        values: &mut Values,
    ) -> Result<(), ConfigError> {
        for (name, value) in table {
            let path = format!("{section}.{}", name.get_ref());
            let Some(key) = keys.iter().find(|key| key.path == path) else {
                let found = nearest(&path, keys.iter().map(|key| key.path));
                return Err(self.unknown("key", &path, found, &name.span()));
            };
            let read = read_value(key, value.get_ref());
            let place = self.place(&value.span());
            match read {
                Ok(value) => values.set(key, value, place),
                Err(reason) => return Err(ConfigError::Value { key: path, reason, place }),
            }
        }
        Ok(())
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

fn read_value(key: &Key, value: &DeValue<'_>) -> Result<Value, String> {
    let wrong = || format!("{} is not {}", value.type_str(), key.kind.description());
    match value {
        DeValue::Array(parts) if key.kind == Kind::List => {
            let texts = parts.iter().map(|part| scalar(part.get_ref()).ok_or_else(wrong));
            texts.collect::<Result<_, _>>().map(Value::List)
        }
        DeValue::String(text) if key.kind != Kind::List => key.parse(text),
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
