-- ARGV: job, trajectory, work item, reason, most attempts, token of this call. The new attempt, or 0: ended.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e or e[STATE] ~= 'running' then
  call('XACK', WORK, 'rollout', ARGV[3])
  call('XDEL', WORK, ARGV[3])
  return 0
end
if e[RETRY] == ARGV[6] then return e[ATTEMPT] end
e[RETRY] = ARGV[6]
count('retried', 1)
if e[ATTEMPT] >= tonumber(ARGV[5]) then
  finish(id, e, 'failed', ARGV[4])
  return 0
end
again(id, e)
return e[ATTEMPT]
