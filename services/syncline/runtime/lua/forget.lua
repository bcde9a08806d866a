-- ARGV: trajectories. Removes records and rewards of ended ones; nil, or a story that breaks the law.
local records, kept, none = {}, {}, pack('')
for i, line in ipairs(lines_of(ARGV)) do
  if line then
    local from, state = some_of(line, RECORD - 1, 1)
    if state == 'running' or state == 'buffered' then return ARGV[i] .. ' is ' .. state end
    local to, record = some_of(line, 1, from)
    if record ~= '' then
      records[#records + 1] = record
      kept[#kept + 1], kept[#kept + 2] = ARGV[i], string.sub(line, 1, from) .. none .. string.sub(line, to + 1)
    end
  end
end
each('XDEL', RECORDS, records)
each('HSET', ENTRIES, kept)
each('HDEL', HELD, ARGV)
each('HDEL', REWARDS, ARGV)
return false
