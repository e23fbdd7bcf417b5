//! Plans of random copies, against a naive copy of every byte and a search of all ways.

use std::cell::Cell;
use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::costs::Rate;

thread_local! {
    /// Questions for the place of a copy, while copies are sorted.
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn count_step() {
    STEPS.set(STEPS.get() + 1);
}

const LIMITS: Limits = Limits { copies_per_call: 4, fragments_per_launch: 5, slice_bytes: 300 };
const BORDERS: Borders = Borders { piece_bytes: 700, registered_bytes: 4000 };
const POOL_BYTES: usize = 5000;

/// Bytes on one side, and the bytes on the other side that belong to them.
type Bytes = BTreeMap<(Direction, usize, u64), u32>;

fn add(bytes: &mut Bytes, direction: Direction, copy: &PlannedCopy) {
    for at in 0..copy.bytes {
        let pair = (direction, copy.offset + at, copy.address + at as u64);
        *bytes.entry(pair).or_default() += 1;
    }
}

fn add_all(bytes: &mut Bytes, direction: Direction, copies: &[PlannedCopy]) {
    for copy in copies {
        add(bytes, direction, copy);
    }
}

impl Ord for Direction {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (*self as u8).cmp(&(*other as u8))
    }
}

impl PartialOrd for Direction {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Checks one call, and adds the bytes that it copies.
fn follow(direction: Direction, call: &Call, limits: &Limits, bytes: &mut Bytes) {
    let is_inside = |copy: &PlannedCopy| {
        let piece = |at: usize| at / BORDERS.piece_bytes;
        let end = copy.offset + copy.bytes;
        end <= BORDERS.registered_bytes && piece(copy.offset) == piece(end - 1)
    };
    match call {
        Call::Direct(copies) => {
            assert!((1..=limits.copies_per_call).contains(&copies.len()));
            assert!(copies.iter().all(is_inside), "{copies:?} cross a border");
            add_all(bytes, direction, copies);
        }
        Call::Mapped(copies) => {
            assert!((1..=limits.fragments_per_launch).contains(&copies.len()));
            assert!(copies.iter().all(is_inside), "{copies:?} cross a border");
            add_all(bytes, direction, copies);
        }
        Call::Unregistered(copies) => {
            let is_outside = |copy: &PlannedCopy| copy.offset >= BORDERS.registered_bytes;
            assert!(copies.iter().all(is_outside), "{copies:?} are registered");
            add_all(bytes, direction, copies);
        }
        Call::Staged(slice) => follow_slice(direction, slice, limits, bytes),
    }
}

fn follow_slice(direction: Direction, slice: &Slice, limits: &Limits, bytes: &mut Bytes) {
    assert!((1..=limits.fragments_per_launch).contains(&slice.fragments.len()));
    let mut staged = BTreeMap::new();
    for run in &slice.runs {
        for at in 0..run.bytes {
            let place = usize::try_from(run.address).unwrap() + at;
            assert!(place < limits.slice_bytes, "{run:?} is over the end");
            assert_eq!(staged.insert(place, run.offset + at), None, "{run:?} overlaps");
        }
        let (first, last) = (run.offset, run.offset + run.bytes - 1);
        assert_eq!(first / BORDERS.piece_bytes, last / BORDERS.piece_bytes, "{run:?} crosses");
    }
    for copy in &slice.fragments {
        for at in 0..copy.bytes {
            let offset = staged.remove(&(copy.offset + at)).unwrap();
            let (address, bytes_of_it) = (copy.address + at as u64, 1);
            add(bytes, direction, &PlannedCopy { offset, address, bytes: bytes_of_it, ..*copy });
        }
    }
    assert!(staged.is_empty(), "bytes are staged and not used: {staged:?}");
}

/// Copies with distinct targets, in any order; many of them neighbours.
fn copies(direction: Direction) -> impl Strategy<Value = Vec<PlannedCopy>> {
    let step = (0..90_usize, 0..3_usize, 0..3_usize, 0..POOL_BYTES);
    let steps = prop::collection::vec(step, 0..40);
    steps
        .prop_map(move |steps| {
            let (mut address, mut offset) = (100_000_usize, 0);
            let mut copies = Vec::new();
            for (bytes, gap, jump, place) in steps {
                address += if gap == 0 { 17 } else { 0 };
                // Sources may be anywhere; targets only go on.
                offset = match (jump, direction) {
                    (0, Direction::ToDevice) => place,
                    (0, Direction::ToHost) => offset + place % 50,
                    _ => offset,
                };
                if offset + bytes <= POOL_BYTES {
                    copies.push(PlannedCopy { offset, address: address as u64, memory: 0, bytes });
                    address += bytes;
                    offset += bytes;
                }
            }
            copies
        })
        .prop_shuffle()
}

fn curve() -> impl Strategy<Value = Curve> {
    (0..300_u64, 0..2000_u64, prop::collection::vec((1..200_usize, 1..2000_u64), 0..3)).prop_map(
        |(call_ns, fragment_ns, mut rates)| {
            rates.sort_unstable();
            let rate = |(fragment_bytes, bytes_per_us)| Rate { fragment_bytes, bytes_per_us };
            Curve { call_ns, fragment_ns, rates: rates.into_iter().map(rate).collect() }
        },
    )
}

fn costs() -> impl Strategy<Value = Option<Costs>> {
    let ways = (curve(), prop::option::of(curve()), prop::option::of(curve()));
    let ways = ways.prop_map(|(direct, mapped, within)| WayCosts { direct, mapped, within });
    prop::option::of(ways.prop_map(|ways| Costs { to_device: ways.clone(), to_host: ways }))
}

fn case() -> impl Strategy<Value = (Direction, Vec<PlannedCopy>, Option<Costs>)> {
    let direction = prop_oneof![Just(Direction::ToDevice), Just(Direction::ToHost)];
    direction.prop_flat_map(|direction| (Just(direction), copies(direction), costs()))
}

/// All copies that the driver or a kernel makes on the pool, as they are before ways are chosen.
fn direct_copies(direction: Direction, copies: &[PlannedCopy]) -> Vec<PlannedCopy> {
    let plan = plan(direction, copies, &BORDERS, &LIMITS, None).unwrap();
    let direct = plan.calls.into_iter().filter_map(|call| match call {
        Call::Direct(copies) => Some(copies),
        _ => None,
    });
    direct.flatten().collect()
}

/// The time of a plan by the formula, counted from its calls.
fn time_ps(plan: &CopyPlan, costs: &WayCosts, limits: &Limits) -> u64 {
    let each = |curve: &Curve, copies: &[PlannedCopy]| {
        copies.iter().map(|copy| curve.fragment_ps(copy.bytes)).sum::<u64>()
    };
    let time = |call: &Call| match call {
        Call::Direct(copies) => costs.direct.calls_ps(1) + each(&costs.direct, copies),
        Call::Mapped(copies) => {
            let mapped = costs.mapped.as_ref().unwrap();
            mapped.calls_ps(1) + each(mapped, copies)
        }
        Call::Staged(slice) => {
            let within = costs.within.as_ref().unwrap();
            let calls = slice.runs.len().div_ceil(limits.copies_per_call);
            let copied = costs.direct.calls_ps(calls) + each(&costs.direct, &slice.runs);
            copied + within.calls_ps(1) + each(within, &slice.fragments)
        }
        Call::Unregistered(_) => 0,
    };
    plan.calls.iter().map(time).sum()
}

proptest! {
    #[test]
    fn every_byte_is_copied_once((direction, copies, costs) in case()) {
        let plan = plan(direction, &copies, &BORDERS, &LIMITS, costs.as_ref()).unwrap();
        let (mut expected, mut planned) = (Bytes::new(), Bytes::new());
        add_all(&mut expected, direction, &copies);
        plan.calls.iter().for_each(|call| follow(direction, call, &LIMITS, &mut planned));
        prop_assert_eq!(planned, expected);
    }

    #[test]
    fn no_two_direct_copies_are_neighbours((direction, copies, _) in case()) {
        let planned = direct_copies(direction, &copies);
        for copy in &planned {
            let goes_on = |next: &&PlannedCopy| {
                let ends = (copy.offset + copy.bytes, copy.address + copy.bytes as u64);
                let is_border = next.offset.is_multiple_of(BORDERS.piece_bytes);
                ends == (next.offset, next.address) && !is_border
            };
            prop_assert_eq!(planned.iter().find(goes_on), None);
        }
    }

    /// The order of the input changes nothing that matters.
    #[test]
    fn the_order_of_copies_does_not_change_the_time((direction, copies, costs) in case()) {
        let mut reversed = copies.clone();
        reversed.reverse();
        let [first, second] = [copies, reversed].map(|copies| {
            plan(direction, &copies, &BORDERS, &LIMITS, costs.as_ref()).unwrap().estimate
        });
        prop_assert_eq!(first, second);
    }

    #[test]
    fn a_plan_takes_what_it_says_and_no_way_takes_less((direction, copies, costs) in case()) {
        let Some(costs) = costs else { return Ok(()) };
        let whole = plan(direction, &copies, &BORDERS, &LIMITS, Some(&costs)).unwrap();
        let said = u64::try_from(whole.estimate.unwrap().as_nanos()).unwrap();
        prop_assert_eq!(said, time_ps(&whole, &costs.to_host, &LIMITS) / 1000);
        let direct = direct_copies(direction, &copies);
        let curves = [
            (Some(&costs.to_host.direct), LIMITS.copies_per_call),
            (costs.to_host.mapped.as_ref(), LIMITS.fragments_per_launch),
        ];
        for (curve, most) in curves.into_iter().filter_map(|(curve, most)| Some((curve?, most))) {
            let each = direct.iter().map(|copy| curve.fragment_ps(copy.bytes)).sum::<u64>();
            prop_assert!(said <= (each + curve.calls_ps(direct.len().div_ceil(most))) / 1000);
        }
    }

    /// Where no limit is met, no other choice of ways for its runs is faster.
    #[test]
    fn no_other_choice_takes_less((direction, copies, costs) in case()) {
        let Some(costs) = costs else { return Ok(()) };
        let (most, slice_bytes) = (9999, 1 << 20);
        let limits = Limits { copies_per_call: most, fragments_per_launch: most, slice_bytes };
        let (mut copies, _) = split(&merge(direction, &copies).unwrap(), &BORDERS);
        sort(&mut copies, |copy| copy.offset as u64);
        let choice = Choice { limits: &limits, costs: &costs.to_host, only: None, copies: &copies };
        let runs = choice.runs(&BORDERS);
        if runs.len() > 6 {
            return Ok(());
        }
        let mut chosen = CopyPlan::default();
        choice.add_calls(&BORDERS, &mut chosen);
        let chosen = time_ps(&chosen, &costs.to_host, &limits);
        for number in 0..3_usize.pow(u32::try_from(runs.len()).unwrap()) {
            let way = |at: u32| WAYS[number / 3_usize.pow(at) % 3];
            let ways: Vec<Way> = (0..).map(way).take(runs.len()).collect();
            let other = choice.time_ps(&runs, &ways);
            prop_assert!(chosen <= other, "{chosen} by the plan, {other} by {ways:?}");
        }
    }

    #[test]
    fn overlapping_targets_are_refused((direction, copies, _) in case(), at in 0..40_usize) {
        let Some(copy) = copies.get(at % copies.len().max(1)) else { return Ok(()) };
        if copy.bytes == 0 {
            return Ok(());
        }
        let again = PlannedCopy { bytes: 1, ..*copy };
        let both = [&copies[..], &[again]].concat();
        let result = plan(direction, &both, &BORDERS, &LIMITS, None);
        prop_assert!(matches!(result, Err(CudaError::Overlap { .. })), "{result:?}");
    }
}

const PAGE: usize = 16 << 10;
const REAL: Limits =
    Limits { copies_per_call: 4096, fragments_per_launch: 4096, slice_bytes: 4 << 20 };
const LARGE: Borders = Borders { piece_bytes: 1 << 30, registered_bytes: 1 << 36 };

fn flat(call_ns: u64, fragment_ns: u64, bytes_per_us: u64) -> Curve {
    Curve { call_ns, fragment_ns, rates: vec![Rate { fragment_bytes: 1, bytes_per_us }] }
}

#[test]
fn a_slice_ends_before_a_run_that_does_not_fit() {
    let copy = |at: usize| PlannedCopy {
        offset: at / 2 * 400 + at % 2 * 100,
        address: (at * 200) as u64,
        memory: 0,
        bytes: 100,
    };
    let copies: Vec<PlannedCopy> = (0..6).map(copy).collect();
    let mut costs = invented();
    (costs.to_host.direct.call_ns, costs.to_host.within) = (0, Some(Curve::default()));
    let planned = |copies: &[PlannedCopy], slice_bytes| {
        let limits = Limits { slice_bytes, ..REAL };
        plan(Direction::ToHost, copies, &LARGE, &limits, Some(&costs)).unwrap()
    };
    let plan = planned(&copies, 712);
    let Some(Call::Staged(slice)) = plan.calls.first() else { panic!("{plan:?}") };
    let runs: Vec<_> = slice.runs.iter().map(|run| (run.address, run.bytes)).collect();
    assert_eq!(runs, [(0, 200), (256, 200), (512, 200)]);
    assert_eq!(ways(&planned(&copies, 711)), ["staged", "staged"], "the third ends at 712");
    let long = PlannedCopy { offset: 10_000, address: 10_000, memory: 0, bytes: 900 };
    let plan = planned(&[&copies[..], &[long]].concat(), 712);
    assert_eq!(ways(&plan), ["direct", "staged"], "one is longer than a slice");
}

/// A machine of tests only. No figure of it was measured.
fn invented() -> Costs {
    let ways = WayCosts {
        direct: flat(5000, 2000, 50_000),
        mapped: Some(flat(6000, 700, 30_000)),
        within: Some(flat(6000, 50, 1_000_000)),
    };
    Costs { to_device: ways.clone(), to_host: ways }
}

/// Pages of the device that lie scattered, in slabs of `pages` pages each.
fn scattered(slabs: usize, pages: usize, bytes: usize) -> Vec<PlannedCopy> {
    let copy = |at: usize| PlannedCopy {
        offset: (at / pages * 2 * pages + at % pages) * bytes,
        address: ((at * 7919 % (slabs * pages)) * 2 * bytes) as u64,
        memory: 0,
        bytes,
    };
    (0..slabs * pages).map(copy).collect()
}

fn ways(plan: &CopyPlan) -> Vec<&'static str> {
    let name = |call: &Call| match call {
        Call::Direct(_) => "direct",
        Call::Mapped(_) => "mapped",
        Call::Staged(_) => "staged",
        Call::Unregistered(_) => "unregistered",
    };
    plan.calls.iter().map(name).collect()
}

#[test]
fn the_way_depends_on_length_and_on_what_slabs_hold() {
    let costs = invented();
    let planned = |copies: &[PlannedCopy], costs: Option<&Costs>| {
        plan(Direction::ToDevice, copies, &LARGE, &REAL, costs).unwrap()
    };
    let long = scattered(8, 1, 2 << 20);
    assert_eq!(ways(&planned(&long, Some(&costs))), ["direct"]);
    let in_slabs = scattered(4, 64, PAGE);
    assert_eq!(ways(&planned(&in_slabs, Some(&costs))), ["staged"]);
    let alone = scattered(256, 1, 4 << 10);
    assert_eq!(ways(&planned(&alone, Some(&costs))), ["mapped"], "no run is long");
    let all = [long, in_slabs.iter().map(|it| shifted(it, 1 << 30)).collect()].concat();
    assert_eq!(ways(&planned(&all, Some(&costs))), ["direct", "staged"]);
    assert_eq!(ways(&planned(&all, None)), ["direct"]);
    let mut without_kernels = costs;
    for ways in [&mut without_kernels.to_device, &mut without_kernels.to_host] {
        (ways.mapped, ways.within) = (None, None);
    }
    assert_eq!(ways(&planned(&all, Some(&without_kernels))), ["direct"]);
}

fn shifted(copy: &PlannedCopy, by: usize) -> PlannedCopy {
    PlannedCopy { offset: copy.offset + by, address: copy.address + by as u64, ..*copy }
}

#[test]
fn neighbours_on_one_side_only_are_not_merged() {
    let copy = |offset, address| PlannedCopy { offset, address, memory: 0, bytes: 64 };
    let planned = |copies: &[PlannedCopy]| {
        let plan = plan(Direction::ToHost, copies, &LARGE, &REAL, None).unwrap();
        let Some(Call::Direct(copies)) = plan.calls.into_iter().next() else { return Vec::new() };
        copies
    };
    assert_eq!(planned(&[copy(0, 1000), copy(64, 2000)]).len(), 2);
    assert_eq!(planned(&[copy(0, 1000), copy(128, 1064)]).len(), 2);
    let whole = PlannedCopy { offset: 0, address: 1000, memory: 0, bytes: 192 };
    assert_eq!(planned(&[copy(128, 1128), copy(0, 1000), copy(64, 1064)]), [whole]);
    let other = PlannedCopy { memory: 1, ..copy(64, 1064) };
    assert_eq!(planned(&[copy(0, 1000), other]).len(), 2, "two allocations side by side");
    assert_eq!(planned(&[]), []);
}

#[test]
fn addresses_over_the_end_are_refused() {
    let copies = [
        PlannedCopy { offset: usize::MAX, address: 0, memory: 0, bytes: 2 },
        PlannedCopy { offset: 0, address: u64::MAX, memory: 0, bytes: 2 },
    ];
    for copy in copies {
        let result = plan(Direction::ToDevice, &[copy], &LARGE, &REAL, None);
        assert!(matches!(result, Err(CudaError::Outside { .. })), "{result:?}");
    }
}

/// One source for many pages: a load of a block that several sequences share.
#[test]
fn a_source_may_be_copied_to_several_targets() {
    let copy = |at: u64| PlannedCopy { offset: 0, address: at * 100, memory: 0, bytes: 64 };
    let copies: Vec<PlannedCopy> = (0..3).map(copy).collect();
    let plan = plan(Direction::ToDevice, &copies, &LARGE, &REAL, None).unwrap();
    assert_eq!(plan.calls, [Call::Direct(copies)]);
}

/// Whatever the order and the ways, two sorts ask at most 6 n log2 n times.
#[test]
fn no_order_of_copies_makes_a_plan_slow() {
    const COUNT: usize = 1 << 15;
    let forward = scattered(COUNT / 64, 64, PAGE);
    let mut reversed = forward.clone();
    reversed.reverse();
    let mut by_target = forward.clone();
    by_target.sort_by_key(|copy| copy.address);
    let (half, rest) = by_target.split_at(COUNT / 2);
    let organ: Vec<PlannedCopy> = half.iter().chain(rest.iter().rev()).copied().collect();
    let mut saw = by_target.clone();
    saw.sort_by_key(|copy| copy.address % 1009);
    let most = 6 * COUNT as u64 * u64::from(COUNT.ilog2());
    for copies in [forward, reversed, by_target, organ, saw] {
        STEPS.set(0);
        let plan = plan(Direction::ToDevice, &copies, &LARGE, &REAL, Some(&invented())).unwrap();
        assert!(STEPS.get() <= most, "{} steps of {most}", STEPS.get());
        assert!(plan.calls.len() <= COUNT / 64 + 1);
    }
}
