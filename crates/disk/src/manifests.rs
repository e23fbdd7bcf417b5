//! The compatibility manifests of the namespaces with blocks in a directory, one file each.

use std::io;
use std::path::{Path, PathBuf};

use cascade_block::{Manifest, Namespace, NamespaceId};
use cascade_runtime::Deadline;

use crate::DiskError;
use crate::io::{FileIo, make_tier_directory, read_whole};
use crate::problem_log::ProblemLog;

/// A manifest file: its content, or why it is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredManifest {
    /// A valid manifest.
    Valid {
        /// The namespace.
        namespace: NamespaceId,
        /// Its manifest.
        manifest: Manifest,
    },
    /// An invalid file. Blocks of its namespace are served all the same, because their keys include
    /// the hash of the manifest.
    Invalid {
        /// The file.
        path: PathBuf,
        /// Why it is invalid.
        reason: String,
    },
}

/// The content of a manifest file. The checksum detects a file that was edited or damaged.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct ManifestFile {
    format_version: u16,
    namespace: String,
    manifest: Manifest,
    manifest_crc32c: u32,
}

const MANIFEST_VERSION: u16 = 1;
/// Far above the size of a manifest, which is a few fields of text.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;

/// Writes a namespace's manifest beside its blocks unless it is already there.
///
/// # Errors
/// If another manifest is stored there under the same name.
pub(crate) fn register(
    io: &FileIo,
    directory: &Path,
    namespace: &Namespace,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let path = directory.join("manifests").join(format!("{}.json", namespace.id()));
    // An invalid file is replaced below.
    if let Some(StoredManifest::Valid { manifest, .. }) = load(io, &path, deadline)? {
        if manifest == *namespace.manifest() {
            // The process that wrote it may have been killed before it synced the name.
            io.sync_directory(&directory.join("manifests"), deadline)?;
            return io.sync_directory(directory, deadline);
        }
        let reason = "it holds another manifest for the same namespace; remove the file if the \
                      blocks of the namespace may be dropped";
        return Err(DiskError::Manifest { path, reason: reason.to_owned() });
    }
    let file = ManifestFile {
        format_version: MANIFEST_VERSION,
        namespace: namespace.id().to_string(),
        manifest: namespace.manifest().clone(),
        manifest_crc32c: manifest_checksum(namespace.manifest()),
    };
    let text = serde_json::to_vec_pretty(&file)
        .map_err(|error| DiskError::Manifest { path: path.clone(), reason: error.to_string() })?;
    let (target, top) = (path.clone(), directory.to_owned());
    io.call("write", &path, deadline, move |files| {
        if let Some(parent) = target.parent() {
            make_tier_directory(files, parent)?;
            // The name of the directory itself.
            files.sync_directory(&top)?;
        }
        files.replace(&target, &text)
    })
}

/// All manifests of a directory, in the order of their names.
pub(crate) fn load_all(
    io: &FileIo,
    directory: &Path,
    deadline: Deadline,
) -> Result<Vec<StoredManifest>, DiskError> {
    let mut paths = match files(io, directory, deadline) {
        Err(DiskError::Io { path, source, .. }) => {
            return Ok(vec![StoredManifest::Invalid { path, reason: source.to_string() }]);
        }
        paths => paths?,
    };
    // `files` also lists temporary files, for an erase.
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    let loaded = paths.iter().map(|path| load(io, path, deadline));
    loaded.filter_map(Result::transpose).collect()
}

/// The invalid manifests of a directory. Each is added to the problems.
pub(crate) fn report_invalid(
    io: &FileIo,
    directory: &Path,
    problems: &ProblemLog,
    deadline: Deadline,
) -> Result<Vec<StoredManifest>, DiskError> {
    let mut found = load_all(io, directory, deadline)?;
    found.retain(|each| {
        let StoredManifest::Invalid { path, reason } = each else { return false };
        problems.add(format!("{}: {reason}", path.display()));
        true
    });
    Ok(found)
}

/// The paths of the manifest files of a directory, in the order of their names.
pub(crate) fn files(
    io: &FileIo,
    directory: &Path,
    deadline: Deadline,
) -> Result<Vec<PathBuf>, DiskError> {
    let directory = directory.join("manifests");
    let listed = directory.clone();
    let mut paths = io.call("list", &directory, deadline, move |files| {
        match files.check_not_link(&listed).and_then(|()| files.list(&listed)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other,
        }
    })?;
    paths.retain(|path| has_extension(path, &["json", "tmp"]));
    paths.sort_unstable();
    Ok(paths)
}

fn load(io: &FileIo, path: &Path, deadline: Deadline) -> Result<Option<StoredManifest>, DiskError> {
    let source = path.to_owned();
    let bytes = io
        .call("read", path, deadline, move |files| read_whole(files, &source, MANIFEST_BYTES_MAX));
    let bytes = match bytes {
        Err(DiskError::Io { source, .. }) => {
            let reason = source.to_string();
            return Ok(Some(StoredManifest::Invalid { path: path.to_owned(), reason }));
        }
        bytes => bytes?,
    };
    Ok(bytes.map(|bytes| parse(path, &bytes)))
}

/// Parses a manifest file and checks its version, name and checksum.
fn parse(path: &Path, bytes: &[u8]) -> StoredManifest {
    let bad =
        |reason: &str| StoredManifest::Invalid { path: path.to_owned(), reason: reason.to_owned() };
    let file: ManifestFile = match serde_json::from_slice(bytes) {
        Ok(file) => file,
        Err(error) => return bad(&format!("the file cannot be parsed: {error}")),
    };
    if file.format_version != MANIFEST_VERSION {
        let found = file.format_version;
        return bad(&format!(
            "it has format version {found}, this program reads {MANIFEST_VERSION}"
        ));
    }
    if path.file_stem().and_then(|stem| stem.to_str()) != Some(&file.namespace) {
        return bad("its name differs from the namespace in it");
    }
    let Some(namespace) = namespace_id(&file.namespace) else {
        return bad("its namespace is not 32 hexadecimal digits");
    };
    if manifest_checksum(&file.manifest) != file.manifest_crc32c {
        return bad("its manifest does not match its checksum");
    }
    StoredManifest::Valid { namespace, manifest: file.manifest }
}

fn manifest_checksum(manifest: &Manifest) -> u32 {
    cascade_block::checksum(&manifest.canonical_bytes())
}

fn namespace_id(text: &str) -> Option<NamespaceId> {
    let mut id = [0; 16];
    // Only ASCII, because the slices below must not split a character.
    if text.len() != 32 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).ok()?;
    }
    Some(NamespaceId::from_bytes(id))
}

/// Whether the extension of a path is one of `known`.
pub(crate) fn has_extension(path: &Path, known: &[&str]) -> bool {
    path.extension().and_then(|extension| extension.to_str()).is_some_and(|it| known.contains(&it))
}
