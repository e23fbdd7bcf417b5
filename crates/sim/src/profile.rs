//! What a world is like, drawn from its seed: tiers and their sizes, settings of the store,
//! callers.

use std::fmt;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_runtime::simulated::Random;
use cascade_store::{
    EncryptionConfig, FilesConfig, HealthConfig, KeepPool, PolicyKind, StoreConfig, WritePolicy,
};

use crate::content::Content;
use crate::key_file;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The directory of the file tier, on the simulated disk.
pub(crate) const DIRECTORY: &str = "/simulated/files";
/// Time-out of each call.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(500);
/// Keys that share their contents in worlds with shared contents.
const SHARING_KEYS: u32 = 4;

/// The tiers of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tiers {
    Dram,
    DramAndFiles,
    Files,
}

/// What happens to the store of a world. Each kind includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trouble {
    /// It is closed and opened again, at most.
    None,
    /// Its process is killed.
    Kills,
    /// The machine loses power.
    PowerLoss,
    /// The disk fails, hangs, and loses or changes bytes.
    Faults,
}

/// What a world is like.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(crate) struct Profile {
    pub(crate) tiers: Tiers,
    /// Whether DRAM holds all blocks of the world at once.
    pub(crate) is_dram_roomy: bool,
    /// Whether the file tier does.
    pub(crate) are_files_roomy: bool,
    pub(crate) is_durable: bool,
    pub(crate) policy: PolicyKind,
    pub(crate) digest: DigestMode,
    pub(crate) write: WritePolicy,
    pub(crate) key_count: u32,
    /// Keys of one chain, in a row.
    pub(crate) chain_length: u32,
    /// Whether keys have equal contents.
    pub(crate) shares_contents: bool,
    /// Lengths of blocks, one as likely as another.
    pub(crate) lengths: Vec<u32>,
    pub(crate) clients: usize,
    pub(crate) trouble: Trouble,
    /// Calls between two reopenings, in the mean; `None`: the store is opened once.
    pub(crate) reopens_after: Option<u64>,
    /// Whether some blocks expire.
    pub(crate) has_expiry: bool,
    /// Whether the wall clock is set forward and back.
    pub(crate) sets_clock: bool,
    /// Whether threads cannot be started now and then.
    pub(crate) fails_threads: bool,
    /// Whether files are encrypted.
    pub(crate) is_encrypted: bool,
    /// Whether the file system commits all changes of names in their order.
    pub(crate) has_journal: bool,
    /// Whether the memory of DRAM is named, so that the next process finds its blocks.
    pub(crate) keeps_pool: bool,
    hash_seed: u64,
    scrubs: bool,
}

/// What a world promises about blocks that were put.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a promise of its own")]
pub(crate) struct Promises {
    /// No block leaves the store while it is open, unless a caller removes it.
    pub(crate) keeps_all: bool,
    /// Blocks on files survive that the store is closed.
    pub(crate) has_files: bool,
    /// No block leaves the files, unless a caller removes it.
    pub(crate) files_keep_all: bool,
    /// What was flushed survives a power loss, as it does a crash of the process.
    pub(crate) survives_power_loss: bool,
    /// Devices fail: calls may, and what files have after a reopening is not known.
    pub(crate) has_faults: bool,
}

impl Profile {
    /// The profile of a world.
    pub(crate) fn draw(random: &mut Random) -> Self {
        let tiers = match random.below(8) {
            0..2 => Tiers::Dram,
            2..7 => Tiers::DramAndFiles,
            _ => Tiers::Files,
        };
        let is_dram_roomy = random.one_in(2);
        let are_files_roomy = random.one_in(2);
        let is_roomy = is_dram_roomy || (tiers != Tiers::Dram && are_files_roomy);
        let mut lengths = vec![0, 1, 100, 4095, 4096, 4097, 16 << 10];
        if is_roomy {
            lengths.push(drawn(random, 2, 8 * KIB));
        } else {
            lengths.extend([0; 6].map(|_: u32| drawn(random, 2, 300 * KIB)));
        }
        let trouble = match tiers {
            Tiers::Dram => Trouble::None,
            _ => [Trouble::None, Trouble::Kills, Trouble::PowerLoss, Trouble::Faults]
                [random.index_below(4)],
        };
        let has_digest = random.one_in(2);
        let digest =
            if has_digest { DigestMode::On(DigestAlgorithm::Blake3) } else { DigestMode::Off };
        let profile = Self {
            tiers,
            is_dram_roomy,
            are_files_roomy,
            is_durable: random.one_in(2),
            policy: [
                PolicyKind::Lru,
                PolicyKind::S3Fifo,
                PolicyKind::Arc,
                PolicyKind::Waterfall,
                PolicyKind::PrefixCost,
            ][random.index_below(5)],
            digest,
            write: if random.one_in(4) { WritePolicy::Through } else { WritePolicy::Back },
            key_count: if is_roomy { drawn(random, 6, 60) } else { drawn(random, 12, 400) },
            chain_length: drawn(random, 1, 30),
            shares_contents: random.one_in(2),
            lengths,
            clients: 3 + random.index_below(4),
            trouble,
            reopens_after: random.one_in(2).then(|| 500 + random.below(8000)),
            hash_seed: random.next_u64(),
            scrubs: !random.one_in(4),
            has_expiry: random.one_in(3),
            sets_clock: random.one_in(4),
            fails_threads: trouble == Trouble::Faults && random.one_in(3),
            is_encrypted: tiers != Tiers::Dram && random.one_in(5),
            has_journal: random.one_in(2),
            keeps_pool: false,
        };
        profile.with_kept_pool(random)
    }

    /// Drawn last, so that the other worlds of a seed stay as they are.
    fn with_kept_pool(mut self, random: &mut Random) -> Self {
        self.keeps_pool = self.tiers != Tiers::Files && random.one_in(3);
        if self.keeps_pool && self.tiers == Tiers::Dram {
            self.trouble =
                [Trouble::None, Trouble::Kills, Trouble::PowerLoss][random.index_below(3)];
        }
        self
    }

    /// Whether the store has a file tier.
    pub(crate) fn has_files(&self) -> bool {
        self.tiers != Tiers::Dram
    }

    /// Whether keys with equal bytes can lose them: an encrypted tier keeps one record for all, and
    /// does not trust the names that earlier runs gave it.
    pub(crate) fn loses_names(&self) -> bool {
        self.is_encrypted && self.digest != DigestMode::Off
    }

    /// What the store promises in this world.
    pub(crate) fn promises(&self) -> Promises {
        let is_roomy = match self.tiers {
            Tiers::Dram => self.is_dram_roomy,
            Tiers::DramAndFiles => self.is_dram_roomy || self.are_files_roomy,
            Tiers::Files => self.are_files_roomy,
        };
        let has_faults = self.trouble == Trouble::Faults;
        Promises {
            keeps_all: is_roomy && !has_faults,
            has_files: self.has_files(),
            files_keep_all: self.are_files_roomy && !has_faults,
            survives_power_loss: self.is_durable && !has_faults,
            has_faults,
        }
    }

    /// The content with this number for a key.
    pub(crate) fn content(&self, key: u32, number: u32) -> Content {
        let owner = if self.shares_contents { key - key % SHARING_KEYS } else { key };
        let mut random = Random::new(u64::from(owner) << 32 | u64::from(number), self.hash_seed);
        Content { owner, number, length: self.lengths[random.index_below(self.lengths.len())] }
    }

    /// The configuration of the store, with the file of its pool if that is named.
    pub(crate) fn store_config(&self, pool_file: Option<PathBuf>) -> StoreConfig {
        let pipeline = match self.tiers {
            Tiers::Dram => "Dram",
            Tiers::DramAndFiles => "Dram|Files",
            Tiers::Files => "Files",
        };
        let files = FilesConfig {
            capacity_bytes: if self.are_files_roomy { 64 * MIB } else { 4 * MIB },
            segment_bytes: MIB,
            durable: self.is_durable,
            ..FilesConfig::new(PathBuf::from(DIRECTORY))
        };
        let encryption = self.is_encrypted.then(|| {
            EncryptionConfig::new(key_file::path().expect("the process may open one more file"))
        });
        StoreConfig {
            encryption,
            pipeline: pipeline.to_owned(),
            dram_bytes: 4 * MIB,
            // The pages of a memory file: their number is not the machine's choice.
            huge_pages: false,
            pool_file,
            keep_pool: KeepPool::Always,
            files: self.has_files().then_some(files),
            policy: self.policy,
            digest: self.digest,
            write: self.write,
            changes_max: 1024,
            timeout: TIMEOUT,
            health: HealthConfig {
                probe_interval: Duration::from_millis(50),
                probe_timeout: Duration::from_millis(20),
                ..HealthConfig::default()
            },
            scrub_bytes_per_second: if self.scrubs { NonZeroU64::new(256 * MIB) } else { None },
            hash_seed: Some(self.hash_seed),
            ..StoreConfig::default()
        }
    }
}

/// A number from `least` to `most`; smaller ones are more likely.
fn drawn(random: &mut Random, least: u64, most: u64) -> u32 {
    let span = most - least + 1;
    let below = 1 + random.below(span);
    u32::try_from(least + random.below(below)).expect("limits fit into 32 bits")
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let room = |is_roomy: bool| if is_roomy { "roomy" } else { "tight" };
        match self.tiers {
            Tiers::Dram => write!(f, "Dram ({})", room(self.is_dram_roomy))?,
            Tiers::DramAndFiles => write!(
                f,
                "Dram|Files ({}, {})",
                room(self.is_dram_roomy),
                room(self.are_files_roomy)
            )?,
            Tiers::Files => write!(f, "Files ({})", room(self.are_files_roomy))?,
        }
        if self.has_files() {
            let durable = if self.is_durable { "durable" } else { "not durable" };
            write!(f, ", {durable}, write-{:?}", self.write)?;
        }
        let digest = if self.digest == DigestMode::Off { "no digests" } else { "digests" };
        let is_encrypted = if self.is_encrypted { ", encrypted" } else { "" };
        let expiry = if self.has_expiry { ", expiry" } else { "" };
        let clock = if self.sets_clock { ", clock set" } else { "" };
        let threads = if self.fails_threads { ", threads fail" } else { "" };
        let warm = if self.keeps_pool { ", warm restarts" } else { "" };
        write!(f, "{is_encrypted}{expiry}{clock}{threads}{warm}")?;
        let (policy, keys, clients) = (self.policy, self.key_count, self.clients);
        write!(f, ", {policy:?}, {digest}, {keys} keys, {clients} clients")?;
        f.write_str(match self.trouble {
            Trouble::None => "",
            Trouble::Kills => ", kills",
            Trouble::PowerLoss => ", power losses",
            Trouble::Faults => ", faults of the disk",
        })
    }
}
