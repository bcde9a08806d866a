-- contract/lag.py `first_breach`: the first version by which more unclaimed groups are due than the updates
-- after `claimed` can take, or false. `change` (version -> how many more groups) is counted in.
local function breach(claimed, batch, max_lag, change)
  local of, versions = {}, {}
  local flat = call('HGETALL', COUNTS)
  for i = 1, #flat, 2 do
    local version = tonumber(string.match(flat[i], '^oldest:(%d+)$'))
    if version then of[version] = tonumber(flat[i + 1]) end
  end
  for version, by in pairs(change) do of[version] = (of[version] or 0) + by end
  for version, groups in pairs(of) do if groups > 0 then versions[#versions + 1] = version end end
  table.sort(versions)
  local total = 0
  for _, version in ipairs(versions) do
    total = total + of[version]
    local due = version + max_lag
    if total > math.max(0, due - claimed) * batch then return due end
  end
  return false
end
