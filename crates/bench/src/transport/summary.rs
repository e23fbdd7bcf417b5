//! The table that compares transports: a line for each length of blocks.

use std::collections::BTreeMap;

use crate::{Figure, size_name};

/// Our transport, and those of others that it is compared with.
const TABLES: [(&str, &[(&str, &str)]); 2] = [
    ("tcp", &[("Mooncake", "mooncake/tcp"), ("NIXL", "nixl/tcp")]),
    ("shm", &[("NIXL", "nixl/same-host")]),
];

/// Writes by one thread. Empty if no other transport was measured.
pub(super) fn lines(figures: &[Figure]) -> Vec<String> {
    TABLES.iter().flat_map(|(backend, others)| table(figures, backend, others)).collect()
}

/// Figures of writes by one thread, by the length of the blocks.
fn writes<'a>(figures: &'a [Figure], of: &str) -> BTreeMap<u64, &'a Figure> {
    let wanted = figures.iter().filter_map(|figure| {
        let row = figure.transport.as_ref()?;
        let ours = row.peer == "cascade" && row.backend == of && figure.name.contains("/write/");
        let is_wanted = ours || format!("{}/{}", row.peer, row.backend) == of;
        (is_wanted && row.threads == 1).then_some((row.block_bytes, figure))
    });
    wanted.collect()
}

fn table(figures: &[Figure], backend: &str, others: &[(&str, &str)]) -> Vec<String> {
    let ours = writes(figures, backend);
    let others: Vec<_> = others.iter().map(|(name, peer)| (*name, writes(figures, peer))).collect();
    if ours.is_empty() || others.iter().all(|(_, cells)| cells.is_empty()) {
        return vec![];
    }
    let title = format!("{backend}, GB/s");
    let mut header = format!("{title:<10}{:>9}{:>10}", "Cascade", "of limit");
    for (name, _) in &others {
        header.push_str(&cell(name, "times"));
    }
    header += "   CPU us a block, in this order";
    let mut lines = vec![String::new(), header];
    for (block_bytes, own) in &ours {
        let block = size_name(usize::try_from(*block_bytes).unwrap_or(usize::MAX));
        let share = own.share.map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0));
        let mut line = format!("{block:<10}{:>9.2}{share:>10}", own.value);
        let mut cpu = vec![cpu_us(own)];
        for (_, cells) in &others {
            let Some(other) = cells.get(block_bytes) else {
                line.push_str(&cell("-", "-"));
                cpu.push("-".to_owned());
                continue;
            };
            let (rate, times) = (other.value, own.value / other.value);
            line.push_str(&cell(&format!("{rate:.2}"), &format!("{times:.1}x")));
            cpu.push(cpu_us(other));
        }
        lines.push(format!("{line}   {}", cpu.join(" / ")));
    }
    lines
}

/// The columns of another transport.
fn cell(rate: &str, times: &str) -> String {
    format!("{rate:>10}{times:>8}")
}

fn cpu_us(figure: &Figure) -> String {
    let cpu = figure.transport.as_ref().and_then(|row| row.cpu_ns_per_block);
    cpu.map_or("-".to_owned(), |ns| format!("{:.1}", ns / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Target;
    use crate::transport::TransportRow;

    fn figure(peer: &str, backend: &str, block_bytes: u64, threads: u64, gbps: f64) -> Figure {
        let row = TransportRow {
            backend: backend.to_owned(),
            block_bytes,
            batch: 1538,
            threads,
            gbps,
            limit_gbps: None,
            peer: peer.to_owned(),
            verified: true,
            cpu_ns_per_block: Some(1500.0),
            system_calls_per_batch: None,
            copies_per_byte: None,
            record_layer: None,
        };
        let name = format!("{backend}/write/of-{peer}");
        let limit = (vec![4.0], "");
        Figure::rate(name, "GB/s", vec![gbps], limit, Target::None).of_transport(row)
    }

    #[test]
    fn a_line_has_ours_and_others_for_the_same_blocks_by_one_thread() {
        let figures = [
            figure("cascade", "tcp", 1024, 1, 2.0),
            figure("cascade", "tcp", 1024, 4, 9.0),
            figure("cascade", "tcp", 4096, 1, 3.0),
            figure("mooncake", "tcp", 1024, 1, 0.04),
            figure("nixl", "tcp", 4096, 1, 0.3),
        ];
        let lines = lines(&figures);
        assert_eq!(lines.len(), 4, "no table without other transports: {lines:#?}");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&lines[2]), "1KiB 2.00 50 % 0.04 50.0x - - 1.5 / 1.5 / -");
        assert_eq!(words(&lines[3]), "4KiB 3.00 75 % - - 0.30 10.0x 1.5 / - / 1.5");
    }
}
