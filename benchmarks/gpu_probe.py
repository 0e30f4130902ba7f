import time, torch, numpy as np, triton
from rowhaul.optim import RowwiseAdagrad
from rowhaul.store import TableSpec
from rowhaul.device.tables import Bags, DeviceTables
from rowhaul.device.segments import Segments
from rowhaul.device import row_kernels
dev=torch.device("cuda")
F,S,D,N=26,65536,64,30_000_000
specs=[TableSpec(f"t{i}",D,-.1,.1) for i in range(F)]
T=DeviceTables(specs,RowwiseAdagrad(0.05),torch.float32,0,dev)
g=torch.Generator(device=dev).manual_seed(0)
t0=time.time()
per=N//F
for f in range(F):
    keys=torch.arange(per,device=dev)*7919+f
    for i in range(0,per,1<<20):
        k=keys[i:i+(1<<20)]; T.find_or_make(k,torch.full((len(k),),f,dtype=torch.int32,device=dev))
torch.cuda.synchronize(); print("filled",time.time()-t0, len(T.index), T.index.allocated_bytes/len(T.index), torch.cuda.memory_allocated()/2**30, flush=True)
tables=torch.arange(F,device=dev,dtype=torch.int32).repeat_interleave(S)
cols=torch.arange(F,device=dev)*D; im=torch.zeros(F,dtype=torch.int32,device=dev)
bags=Bags(S,F*S,None,None,cols,im)
out=torch.empty(S,F*D,device=dev); grad=torch.randn(S,F*D,device=dev,generator=g)
def ids(kind):
    if kind=="even": r=torch.randint(0,per,(F*S,),device=dev,generator=g)
    else:
        u=torch.rand(F*S,device=dev,generator=g); r=(per**u).long()-1  # zipf-1 like
    return r*7919+tables.long()
def timed(fn,n=20):
    fn(); torch.cuda.synchronize()
    ts=[]
    for _ in range(n):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); fn(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[n//2]
a=torch.empty(2**28,device=dev); b=torch.empty_like(a); print("copy 2x1GiB TB/s", 2*2**30/timed(lambda:b.copy_(a))/1e9)
for kind in ("even","skewed"):
    keys=ids(kind)
    rec=T.find(keys,tables); print(kind,"missing",int((rec<0).sum()),"distinct",len(torch.unique(rec)))
    print(" find",timed(lambda:T.find(keys,tables)))
    print(" find_or_make",timed(lambda:T.find_or_make(keys,tables)))
    print(" pool",timed(lambda:T.pool(rec,bags,None,out)))
    print(" sort",timed(lambda:torch.sort(rec,stable=True)))
    print(" segments",timed(lambda:Segments(rec)))
    print(" step",timed(lambda:T.step(rec,bags,grad,0.05,1)))
    import rowhaul.device.tables as tb
    orig=tb.rows_together
    for el in (512,1024,2048,4096):
        tb.rows_together=lambda w,e=None,el=el: max(1,el//64)
        try: print("  elements",el,"pool",round(timed(lambda:T.pool(rec,bags,None,out)),3),"step",round(timed(lambda:T.step(rec,bags,grad,0.05,1)),3),flush=True)
        except Exception as e: print(repr(e)[:200])
    tb.rows_together=orig
    import rowhaul.device.segments as sg
    for L in (8,16,64):
        sg.LONG=tb.LONG=L
        print("  LONG",L,"step",round(timed(lambda:T.step(rec,bags,grad,0.05,1)),3),flush=True)
    sg.LONG=tb.LONG=32
    seg=Segments(rec)
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        T.find_or_make(keys,tables); T.step(rec,bags,grad,0.05,1); torch.cuda.synchronize()
    print(prof.key_averages().table(sort_by="cuda_time_total",row_limit=18,max_name_column_width=40)[:6000])
    def whole():
        r=T.find_or_make(keys,tables); T.pool(r,bags,None,out); T.step(r,bags,grad,0.05,1)
    print(" whole",timed(whole))
k=row_kernels.pool
try:
    for dev_i,cache in k.device_caches.items():
        for key,c in cache[0].items(): print("pool v4:", "ld.global.v4" in c.asm["ptx"], c.n_regs, c.n_spills)
except Exception as e: print(repr(e)[:200])
