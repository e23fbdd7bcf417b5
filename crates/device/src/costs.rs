//! What copies cost on one machine: the table by which a plan chooses the way of each copy.
//!
//! There is no default table: other people's figures differ by machine, and none was measured by
//! us. Without a table of its own machine, every copy is direct.

/// One picosecond is the unit of times here: a copy of 64 bytes takes about a thousand.
const PS_PER_NS: u64 = 1000;
/// Bytes in a microsecond to picoseconds for a byte.
const PS_PER_US: u64 = 1_000_000;

/// How fast fragments of a length are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// The length of a fragment from which on this rate holds.
    pub fragment_bytes: usize,
    /// The rate, without what each call and each fragment costs.
    pub bytes_per_us: u64,
}

/// What calls of one function cost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Curve {
    /// What a call costs, whatever it copies.
    pub call_ns: u64,
    /// What each fragment of a call costs, however short it is.
    pub fragment_ns: u64,
    /// Rates by length, shortest first. The first also holds for what is shorter; without any,
    /// bytes cost nothing.
    pub rates: Vec<Rate>,
}

impl Curve {
    /// The time of `calls` calls, without their fragments.
    pub(crate) fn calls_ps(&self, calls: usize) -> u64 {
        (calls as u64).saturating_mul(self.call_ns).saturating_mul(PS_PER_NS)
    }

    /// The time of one fragment, without its call.
    pub(crate) fn fragment_ps(&self, bytes: usize) -> u64 {
        let after = self.rates.partition_point(|rate| rate.fragment_bytes <= bytes);
        let rate = self.rates.get(after.saturating_sub(1));
        let bytes_ps = rate
            .map_or(0, |rate| (bytes as u64).saturating_mul(PS_PER_US) / rate.bytes_per_us.max(1));
        self.fragment_ns.saturating_mul(PS_PER_NS).saturating_add(bytes_ps)
    }
}

/// What the ways of one direction cost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WayCosts {
    /// Copies by the driver, between registered host memory and the device.
    pub direct: Curve,
    /// A kernel on registered host memory; none if there is no kernel or no device address.
    pub mapped: Option<Curve>,
    /// A kernel within the memory of the device; none if there is no kernel.
    pub within: Option<Curve>,
}

/// What copies cost on one machine, by direction.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Costs {
    /// From the host to the device.
    pub to_device: WayCosts,
    /// From the device to the host.
    pub to_host: WayCosts,
}

impl Costs {
    /// A table that has all ways and knows no time: for plans whose way is given.
    pub(crate) fn unknown() -> Self {
        let curve = || Some(Curve::default());
        let ways = WayCosts { direct: Curve::default(), mapped: curve(), within: curve() };
        Self { to_device: ways.clone(), to_host: ways }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_holds_from_its_length_on() {
        let rate = |fragment_bytes, bytes_per_us| Rate { fragment_bytes, bytes_per_us };
        let rates = vec![rate(4096, 1000), rate(65536, 50_000)];
        let curve = Curve { call_ns: 3000, fragment_ns: 2, rates };
        assert_eq!(curve.fragment_ps(1000), 2000 + 1_000_000, "the first holds below, too");
        assert_eq!(curve.fragment_ps(65535), 2000 + 65_535_000);
        assert_eq!(curve.fragment_ps(65536), 2000 + 1_310_720);
        assert_eq!(curve.calls_ps(2), 6_000_000);
        assert_eq!(Curve { rates: Vec::new(), ..curve }.fragment_ps(1 << 20), 2000);
        let stopped = Curve { rates: vec![rate(0, 0)], ..Curve::default() };
        assert_eq!(stopped.fragment_ps(1), PS_PER_US, "a rate of zero is no division by zero");
    }
}
