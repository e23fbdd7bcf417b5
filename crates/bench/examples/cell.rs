//! scratch
use cascade_bench::{study::*, trace::Trace};
use cascade_store::eviction::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let only = args.get(2).cloned().unwrap_or_default();
    let mut traces = vec![];
    for p in args[1].split(',') {
        traces.push(Trace::read(std::path::Path::new(p)).unwrap());
    }
    if std::env::var("ALL").is_ok() {
        let t = traces[0].clone();
        let mid = t.requests[t.requests.len()/2].at;
        let mut a = t.until(mid); a.name = "conv-first".into();
        let mut b = t.clone(); b.requests.retain(|r| r.at >= mid); b.name = "conv-second".into();
        // mix
        let mut m = t.clone(); m.name = "mix".into();
        let n = m.unique_blocks; let ag = &traces[1];
        for r in &ag.requests { let mut r = r.clone(); r.blocks.iter_mut().for_each(|b| *b += n); m.requests.push(r); }
        m.unique_blocks += ag.unique_blocks; m.requests.sort_by_key(|r| r.at);
        // agent half
        let mut h = ag.clone(); h.requests.retain(|r| r.session.unwrap() % 2 == 0); h.name="agents-even".into();
        traces.push(a); traces.push(b); traces.push(m); traces.push(h); traces.push(generated(1));
    }
    let mut mean = [0.0f64; 6]; let sizes = [1, 2, 5, 10, 25, 50];
    for t in &traces {
        let mut seen = std::collections::HashSet::new();
        t.requests.iter().for_each(|r| seen.extend(r.blocks.iter().copied()));
        let unique = seen.len() as u64;
        println!("{} {} requests {} unique", t.name, t.requests.len(), unique);
        let mut best = [0.0f64; 6]; if let Ok(c) = std::fs::read_to_string(format!("/tmp/best-{}", t.name)) { for (i,v) in c.split_whitespace().enumerate() { best[i] = v.parse().unwrap(); } }
        type Mk = fn() -> Box<dyn Policy>;
        let pols: Vec<(&str, Mk)> = vec![
            ("lru", || Box::new(Lru::default())),
            ("s3", || Box::new(S3Fifo::default())),
            ("s3@1", || Box::new(S3Fifo::promoting_at(1))),
            ("arc", || Box::new(Arc::default())),
            ("pc", || Box::new(PrefixCost::default())),
        ];
        for (n, mk) in pols {
            if !only.is_empty() && !only.split(',').any(|o| o == n) {
                continue;
            }
            let start = std::time::Instant::now();
            let mut line = format!("{n:6}");
            let mut gain = String::new();
            let mut mem = String::new();
            for (i, s) in sizes.iter().enumerate() {
                let r = replay_metadata(t, mk(), unique * s / 100, &StudyOptions::default());
                let h = r.hit_rate() * 100.0;
                if n != "pc" {
                    best[i] = best[i].max(h);
                } else if best[i] > 0.0 {
                    let g = (h / best[i] - 1.0) * 100.0; gain += &format!(" {g:+.1}"); mean[i] += g;
                }
                line += &format!(" {h:6.2}");
                mem += &format!(" {}", r.memory_bytes / (unique * s / 100));
            }
            println!("{line}  [{:.2}s] {gain} mem/blk{mem}", start.elapsed().as_secs_f64());
        }
        if only.is_empty() {
            std::fs::write(format!("/tmp/best-{}", t.name), best.map(|b| b.to_string()).join(" ")).unwrap();
            let line: String = sizes
                .iter()
                .map(|s| format!(" {:6.2}", optimum(t, unique * s / 100).hit_rate() * 100.0))
                .collect();
            println!("opt   {line}");
        }
    }
    println!("mean {:?}", mean.map(|m| (m / traces.len() as f64 * 10.0).round() / 10.0));
}
