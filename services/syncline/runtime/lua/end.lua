-- ARGV: job, trajectory, state, reason. 1; 0: it has ended already; -1: unknown.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e then return -1 end
if e[STATE] ~= 'running' and e[STATE] ~= 'buffered' then return 0 end
finish(id, e, ARGV[3], ARGV[4])
return 1
