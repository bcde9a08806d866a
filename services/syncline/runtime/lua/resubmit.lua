-- ARGV: job, trajectory, packed work item. The new attempt; 0: not running, or its work item is there.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e or e[STATE] ~= 'running' then return 0 end
if #call('XRANGE', WORK, e[WORK_ID], e[WORK_ID]) > 0 then return 0 end
e[WORK_ID] = call('XADD', WORK, '*', 'm', ARGV[3])
again(id, e)
count('resubmitted', 1)
return e[ATTEMPT]
