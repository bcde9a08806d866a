-- ARGV: group, size, demand, then for each member: trajectory, index, prompt, packed work item. 1; 0: known already.
local group, size = tonumber(ARGV[1]), tonumber(ARGV[2])
if call('HEXISTS', HELD, ARGV[4]) == 1 or call('HEXISTS', ENTRIES, ARGV[4]) == 1 then return 0 end
local kept = {}
for i = 4, #ARGV, 4 do
  local work = call('XADD', WORK, '*', 'm', ARGV[i + 3])
  local index, prompt = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  kept[#kept + 1] = ARGV[i]
  kept[#kept + 1] = pack({'running', 1, '', -1, -1, group, index, prompt, -1, work, '', '', '', '', -1})
end
each('HSET', HELD, kept)
call('HSET', GROUPS, group, pack({size, 0, 0, -1, 'open', -1, ARGV[3]}))
count('submitted', size)
count('running', size)
return 1
