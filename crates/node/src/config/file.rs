//! Reads the configuration file, which is TOML. Each value keeps its line number for messages.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::key::{ADVANCED, SettingKey};
use super::keys::{KEYS, SECTIONS, TENANT_KEYS, nearest_name};
use super::settings::{SettingSource, Settings, Values};
use super::value::{SettingValue, ValueKind};

/// Size limit. A configuration is short, so a larger file was named by mistake.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Sets all keys of the file.
pub(super) fn read(path: &Path, settings: &mut Settings) -> Result<(), ConfigError> {
    let text =
        read_text(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let document = Document { path, text: &text };
    let table = DeTable::parse(&text).map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        line: document.line(&error.span().unwrap_or_default()),
        reason: error.message().to_owned(),
    })?;
    for (name, value) in table.get_ref() {
        document.read_top_level(name, value, settings)?;
    }
    Ok(())
}

fn read_text(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > FILE_BYTES_MAX {
        let reason = format!("the file is larger than {FILE_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    fs::read_to_string(path)
}

/// The file during reading.
struct Document<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Document<'_> {
    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.as_bytes().iter().take(span.start);
        1 + before.filter(|byte| **byte == b'\n').count()
    }

    fn place(&self, span: &Range<usize>) -> SettingSource {
        SettingSource::File { path: self.path.to_owned(), line: self.line(span) }
    }

    /// Reads one name at the top level of the file: a key, or a table.
    fn read_top_level(
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
                    self.read_keys(name, table, &mut values)?;
                    settings.tenants.push(values);
                }
                Ok(())
            }
            _ if name == "tenant" => misplaced("write one [[tenant]] for each tenant".to_owned()),
            DeValue::Table(table) if name == ADVANCED => {
                self.read_keys(name, table, &mut settings.node)
            }
            _ if name == ADVANCED => {
                misplaced("is a table; write [advanced] with its keys below".to_owned())
            }
            DeValue::Table(_) if !KEYS.iter().any(|key| key.path == name) => {
                let sections = SECTIONS.iter().map(|(section, _)| *section);
                Err(self.unknown("table", name, nearest_name(name, sections), &span))
            }
            _ => self.read_key("", name, &span, value, &mut settings.node),
        }
    }

    fn read_keys(
        &self,
        section: &str,
        table: &DeTable<'_>,
        values: &mut Values,
    ) -> Result<(), ConfigError> {
        for (name, value) in table {
            self.read_key(section, name.get_ref(), &name.span(), value, values)?;
        }
        Ok(())
    }

    /// Reads one key of the table `section`, or of the top level if it is empty.
    fn read_key(
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
            let found = nearest_name(&path, keys.iter().map(|key| key.path));
            return Err(self.unknown("key", &path, found, span));
        };
        let place = self.place(&value.span());
        let wrong = |reason| ConfigError::Value { key: path.clone(), reason, place: place.clone() };
        if key.section() != section {
            return Err(wrong(expected_place(key.section())));
        }
        let value = read_value(key, value.get_ref()).map_err(wrong)?;
        values.set(key, value, place);
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

/// The right place for a key that is in the wrong table.
fn expected_place(section: &str) -> String {
    match section {
        "" => "belongs at the top of the file, above all tables".to_owned(),
        section => format!("belongs below [{section}]"),
    }
}

fn read_value(key: &SettingKey, value: &DeValue<'_>) -> Result<SettingValue, String> {
    let wrong = || format!("{} is not {}", value.type_str(), key.kind.description());
    match value {
        DeValue::Array(parts) if key.kind == ValueKind::List => {
            let texts = parts.iter().map(|part| scalar(part.get_ref()).ok_or_else(wrong));
            texts.collect::<Result<_, _>>().map(SettingValue::List)
        }
        DeValue::String(text) if key.kind != ValueKind::List => key.parse(text),
        DeValue::Float(number) if !key.kind.is_quoted() || key.kind == ValueKind::Duration => {
            key.parse(number.as_str())
        }
        DeValue::Integer(number) if key.kind == ValueKind::Mode => match number.radix() {
            8 => key.parse(number.as_str()),
            _ => Err(format!("write octal digits in quotes: \"0{}\"", number.as_str())),
        },
        _ if key.kind.is_quoted() => Err(wrong()),
        _ => key.parse(&scalar(value).ok_or_else(wrong)?),
    }
}

/// A string, integer or boolean as text.
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
