-- ARGV: job, trajectory, attempt, state, packed reward. 1, or 0: fenced or rewarded already.
local id, e = ARGV[2], entry_of(ARGV[2])
if not e or e[STATE] ~= 'buffered' or e[ATTEMPT] ~= tonumber(ARGV[3]) or e[REWARD] ~= '' then
  count('refused', 1)
  return 0
end
e[REWARD] = ARGV[4]
keep(id, e)
call('HSET', REWARDS, id, ARGV[5])
local g = group_of(e[GROUP])
g[ACCOUNTED] = g[ACCOUNTED] + 1
settle(e[GROUP], g)
return 1
