import sys
from pathlib import Path
from tests.integration.test_device_clock import *
from tests.integration.test_capture import WORKLOADS
from tests.integration.test_timeline import timelines, events
from megaprof.analysis.report.report import analyze
if __name__ == "__main__":
    import tempfile
    tmp=Path(tempfile.mkdtemp()); lib=compiled(tmp)
    for name in sys.argv[1:]:
        w=WORKLOADS[name]
        for kind in (None,str(lib)):
            d=tmp/f"{name}-{'gpu' if kind else 'host'}"
            run_ranks(train, w.world_size, w, kind, str(d), timeout=240)
            print("=====",name,kind, d)
            for rank,t in timelines(d).items():
                for e in events(t,5)[:40] : print(rank,e)
                print(t.steps[5], t.metadata[0].timeline)
            r=analyze(d).targets[0]; m=r.measured
            print("step",m.step_time_ms, "replay",r.what_if.replay_error, r.what_if.__dict__.keys() if hasattr(r.what_if,'__dict__') else '')
            for s in m.stages: print(s.stage if hasattr(s,'stage') else '', s.forward_ms, s.compute_ms, s.bubble_ms, s.bubble_split, s.exposed_ms)
            print(m.warnings); print(getattr(m,'links',None)); print([c.kind for c in r.verdict.causes])
